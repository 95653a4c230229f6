"""Writes calls of the native library for `driver.cpp` to run again; see `recorder`.

python tests/kernels/record.py FILE
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare  # first: it finds what it needs in tests/helpers
import decode_compare
import encode_compare
import learn_compare
import test_chosen
import test_index
import torch
from closeness import bound_of
from matrix import ATTENDED, UNTREATED
from recorder import Recorder

from kvpact import CacheGeometry, create_cache
from kvpact.kernels.cpu.index import scan
from kvpact.kernels.index import torch_scores

STEPS = (
    *("turboquant:bits=4", "turboquant:bits=3,window=5,sinks=3", "kivi:bits=2/int:bits=8"),
    "trellis:bits=3,first=false,weights=false,blocks=false",
)
TRELLISES = (
    *("trellis:bits=5", "trellis:bits=4", "trellis:bits=2,states=8"),
    f"trellis:bits=3,{UNTREATED}",
)


def record_attend(recorder: Recorder, **case: Any) -> None:
    """Record one call of `compare.both`: one step where it is one."""
    before = len(recorder.cases)
    expected, _, _ = compare.both(**case)
    bound = bound_of(case["spec"])
    if "dtype" in case:
        bound = torch.finfo(case["dtype"]).eps / 2  # what is expected was rounded to it
    attends = ("attend", "attend_rows", "step")
    made = [one for one in recorder.cases[before:] if one.operation in attends]
    for one, rows in zip(made, expected.chunk(len(made)), strict=True):
        one.label = " ".join(str(value) for value in case.values())[:111]
        by_token = one.operation != "step" and rows.shape[2] > 1
        one.expect(rows.transpose(1, 2) if by_token else rows, bound)
    recorder.cases[before:] = made


def record_encode(
    recorder: Recorder, make: Callable[..., Any], spec: str, side: str, dim: int, *place: Any
) -> None:
    """Record one call of `encode_compare.compare` with the tokens that `make` makes."""
    before = len(recorder.cases)
    pieces, start = make(spec, side, dim, *place)
    assert encode_compare.compare(spec, side, pieces, start) == ""
    for one in recorder.cases[before:]:
        one.label = f"{spec} {side} {dim} {place}"


def record_learn(recorder: Recorder, case: learn_compare.Case) -> None:
    """Record the call of `learn_compare.compare`."""
    before = len(recorder.cases)
    assert learn_compare.compare(case) == ""
    for one in recorder.cases[before:]:
        one.label = str(case)[:111]


def record_decode(recorder: Recorder, spec: str, side: str, dim: int, *place: Any) -> None:
    """Record the calls of `decode_compare.compare`."""
    before = len(recorder.cases)
    assert decode_compare.compare(spec, side, dim, *place) == ""
    made = [one for one in recorder.cases[before:] if one.operation == "decode"]
    for one in made:
        one.label = f"{spec} {side} {dim} {place}"
    recorder.cases[before:] = made


def record_steps(recorder: Recorder, spec: str, layout: str = "contiguous", rows: int = 1) -> None:
    """Record steps of one call each; the tests compare such steps with the ordinary way."""
    before = len(recorder.cases)
    options = {"num_pages": 2 * rows, "page_size": 128} if layout == "paged" else {}
    cache = create_cache(spec, CacheGeometry(1, 2, 64, dtype=torch.float32), layout, **options)
    tokens = torch.randn(rows, 10, 134, 64, generator=torch.Generator().manual_seed(rows))
    cache.prefill(0, tokens[:, :2, :124], tokens[:, 2:4, :124])
    for k, v, q in (x.split((2, 2, 6), 1) for x in tokens[:, :, 124:].split(1, 2)):
        cache.attend(0, k=k.contiguous(), v=v.contiguous(), q=q.contiguous())
    made = [one for one in recorder.cases[before:] if one.operation == "step"]
    assert made, spec
    for one in made:
        one.label, one.bound = f"{spec} {layout} {rows}", bound_of(spec)
    recorder.cases[before:] = made


def record_prompt(recorder: Recorder, spec: str, tokens: int, dtype: torch.dtype) -> None:
    """Record the first tokens of a layer like another one; a test compares the two ways."""
    before = len(recorder.cases)
    cache = create_cache(spec, CacheGeometry(2, 3, 64, dtype=dtype))
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        shapes = ((2, heads, tokens, 64) for heads in (3, 3, 6))
        k, v, q = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        cache.attend(layer, k=k, v=v, q=q)
    made = [one for one in recorder.cases[before:] if one.operation == "prompt"][-1:]
    assert made, spec
    made[0].label = f"{spec} {tokens} {dtype}"
    recorder.cases[before:] = made


def record_chosen(recorder: Recorder, spec: str, latent: bool) -> None:
    """Record the copies of slots for attention over a few tokens."""
    before = len(recorder.cases)
    cache, k, v, q = test_chosen.filled(spec, "cpu", latent)
    wanted, got, ran = test_chosen.both(cache, k, v, q, test_chosen.some(2, 1, 1, 40))
    assert ran == 1 and test_chosen.error(wanted, got) <= test_chosen.WHOLE_BOUND
    made = [one for one in recorder.cases[before:] if one.operation == "gather"]
    assert made, spec
    for one in made:
        one.label = f"{spec} {latent}"
    recorder.cases[before:] = made


def record_scan(recorder: Recorder, *shape: int) -> None:
    """Record scans of an index, with weights and without."""
    codes, scale, q, weight = test_index.given(*shape)
    for given in (weight, None):
        expected = torch_scores(codes, scale, q, given)
        scan(codes, scale, q, given, torch.full_like(expected, torch.nan))
        recorder.cases[-1].label = str(shape)
        recorder.cases[-1].expect(expected, bound_of("turboquant:bits=4"))


def record_all(recorder: Recorder) -> None:
    """Record all formats, and shapes and rules with edges."""
    mask = torch.arange(303).expand(1, 1, 3, 303) % 3 > 0
    for case in (
        *compare.cases(),
        *({"spec": spec} for spec in ("turboquant:bits=2", "int:bits=8,group=64")),
        {"spec": "turboquant:bits=4", "new": 3, "mask": mask, "softcap": 1.5},
        {"spec": "kivi:bits=2", "new": 16, "sink_logits": torch.linspace(-2, 4, 6)},
        {"spec": "turboquant:bits=2", "batch": 3, "padding": torch.tensor([0, 5, 140])},
        {"spec": "int:bits=4", "layout": "paged", "sliding_window": 40},
        {"spec": "turboquant:bits=3", "dtype": torch.float16, "held": 700},
        *({"spec": spec, "new": 21, "held": 270} for spec in ATTENDED),
        {"spec": "turboquant:bits=4", "dtype": torch.bfloat16, "held": 31},
        {"spec": "turboquant:bits=4", "held": 0, "new": 150, "sliding_window": 60},
        {"spec": "none", "held": 0, "new": 70, "dim": 36, "value_dim": 100, "batch": 2},
        {"spec": "int:bits=4", "held": 0, "new": 33, "dtype": torch.float16},
        *({"spec": spec, "backend": "auto", "held": 200} for spec in TRELLISES),
        {"spec": TRELLISES[0], "backend": "auto", "new": 21, "held": 200, "dim": 32},
        *({"spec": "turboquant:bits=4", "offset": 9.0, "new": new} for new in (1, 21)),
    ):
        record_attend(recorder, **case)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for groups, spec in ((2, "turboquant:bits=4"), (3, "turboquant:bits=8"), (7, "int:bits=4")):
        # Heads don't divide by the threads, so these share the tokens of a head.
        record_attend(recorder, spec=spec, heads=3, held=4500, groups=groups)
    torch.set_num_threads(threads)
    for spec in STEPS:
        record_steps(recorder, spec)
        record_steps(recorder, spec, "paged", 3)
    widths = itertools.cycle((20, 33, 64, 80, 128))
    for spec, place, side in itertools.product(encode_compare.FORMATS, encode_compare.PLACES, "kv"):
        record_encode(recorder, encode_compare.random_pieces, spec, side, next(widths), *place)
    for case in encode_compare.trellis_cases():
        record_encode(recorder, encode_compare.treated_pieces, *case)
    for case in itertools.islice(learn_compare.cases(), 0, None, 11):
        record_learn(recorder, case)
    dtypes = itertools.cycle(decode_compare.DTYPES)
    for spec, tokens in itertools.product(("trellis:bits=4", "int:bits=8"), (20, 64, 128, 700)):
        record_prompt(recorder, spec, tokens, next(dtypes))
    combinations = itertools.product(decode_compare.FORMATS, decode_compare.PLACES, "kv")
    for spec, place, side in itertools.islice(combinations, 0, None, 7):
        record_decode(recorder, spec, side, next(widths), *place, next(dtypes))
    for latent, spec in itertools.product((False, True), ("turboquant:bits=4/int:bits=8", "none")):
        record_chosen(recorder, spec, latent)
    for shape in ((1, 1, 32, 1, 1), (2, 3, 96, 2, 5), (3, 17, 128, 1, 64)):
        record_scan(recorder, *shape)


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    with Recorder().recording() as recorder:
        record_all(recorder)
    recorder.write(options.file)
    print(f"{len(recorder.cases)} cases, {options.file.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
