"""Attention over a prompt, and over chunks of one behind a long past, beside torch's own.

    python benchmarks/prompt.py [--tokens 512 2048 4096 8192] [--past 4096 8192 16384 32768]
        [--chunks 256 512] [--shapes A B] [--threads 1 2] [--rounds 9] [--out DIR]

One layer, fp32. A: 32 query heads, 8 KV heads, D = 128; B: 9, 3, 64. Ours are the calls that an
engine makes, `cache.attend`: the new tokens are checked, attended and stored in 4 bits. torch's are
`scaled_dot_product_attention` over K and V that lie ready, nothing stored: with `is_causal` for a
prompt, with a mask over a past; there, for information, also without a mask, which gives other
numbers and is as fast as torch can be. All take turns in each round. Medians, quartiles and ratios
of the medians are printed and written to DIR/prompt.json and DIR/prompt.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is loaded: or its threads spin after a call, on the cores that the next one needs.
import torch
from attend_rounds import Turn, measure, quartiles
from machine import about, head
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpact import CacheGeometry, create_cache

SHAPES = {"A": (8, 4, 128), "B": (3, 3, 64)}
Tokens = tuple[Tensor, Tensor, Tensor]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tokens_of(shape: str, count: int, generator: torch.Generator) -> Tokens:
    """Return random k, v and q of `count` tokens."""
    heads, groups, dim = SHAPES[shape]
    k, v = (torch.randn(1, heads, count, dim, generator=generator) for _ in "kv")
    return k, v, torch.randn(1, heads * groups, count, dim, generator=generator)


def turns_of(spec: str, shape: str, past: int, new: int) -> dict[str, Turn]:
    """Return the candidates for `new` tokens behind `past` ones."""
    heads, _, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(past + new)
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    whole = [torch.empty(1, heads, past + new, dim) for _ in "kv"]
    held = create_cache(spec, geometry)
    for start in range(0, past, 1024):
        size = min(1024, past - start)
        k, v, _ = tokens_of(shape, size, generator)
        held.store(0, k=k, v=v)
        for all_tokens, x in zip(whole, (k, v), strict=True):
            all_tokens[:, :, start : start + size] = x
    k, v, q = tokens_of(shape, new, generator)
    for all_tokens, x in zip(whole, (k, v), strict=True):
        all_tokens[:, :, past:] = x

    def ours() -> float:
        cache = held.fork() if past else create_cache(spec, geometry)
        return timed(lambda: cache.attend(0, k=k, v=v, q=q))

    def theirs(**options: Any) -> Turn:
        return lambda: timed(
            lambda: scaled_dot_product_attention(q, *whole, enable_gqa=True, **options)
        )

    if not past:
        return {"kvpact": ours, "sdpa": theirs(is_causal=True)}
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    return {"kvpact": ours, "sdpa": theirs(attn_mask=mask), "sdpa, no mask": theirs()}


def row_of(times: dict[str, list[float]], **case: Any) -> dict[str, Any]:
    """Return medians and quartiles in milliseconds, and how much longer torch takes."""
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    told = {name: [x * 1e3 for x in quartiles(found)[::2]] for name, found in times.items()}
    ratios = {name: medians[name] / medians["kvpact"] for name in medians if name != "kvpact"}
    return {**case, "ms": medians, "ms_quartiles": told, "ratios": ratios}


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [row["shape"], row["past"], row["new"], row["threads"]]
    for name in ("kvpact", "sdpa"):
        low, high = row["ms_quartiles"][name]
        cells.append(f"{row['ms'][name]:.2f} ({low:.2f}-{high:.2f})")
    for name in ("sdpa", "sdpa, no mask"):
        cells.append(f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "")
    return f"| {' | '.join(map(str, cells))} |"


def markdown(rows: list[dict[str, Any]], told: dict[str, object]) -> str:
    """Return the report."""
    titles = ["shape", "past", "new", "threads", "kvpact, ms (quartiles)", "sdpa, ms (quartiles)"]
    titles += ["sdpa / kvpact", "without a mask / kvpact"]
    lines = ["# Attention over prompts and chunks\n", head(told) + "\n"]
    lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *map(line_of, rows)]) + "\n"


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="*", default=[512, 2048, 4096, 8192], help="of prompts")
    add("--past", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    add("--chunks", type=int, nargs="+", default=[256, 512], help="new tokens behind a past")
    add("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--spec", default="turboquant:bits=4")
    add("--threads", type=int, nargs="+", default=[1, 2])
    add("--rounds", type=int, default=9)
    add("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    told = about(spec=options.spec, rounds=options.rounds)
    cases = [(0, new) for new in options.tokens]
    cases += [(past, new) for past in options.past for new in options.chunks]
    rows: list[dict[str, Any]] = []
    print(markdown([], told), end="")
    for shape in options.shapes:
        for past, new in cases:
            turns = turns_of(options.spec, shape, past, new)
            for threads in options.threads:
                torch.set_num_threads(threads)
                times = measure(turns, options.rounds)
                rows.append(row_of(times, shape=shape, past=past, new=new, threads=threads))
                print(line_of(rows[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prompt.json").write_text(json.dumps({"about": told, "rows": rows}, indent=1))
    (options.out / "prompt.md").write_text(markdown(rows, told))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
