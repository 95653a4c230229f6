"""Encoding into slots and decoding, beside torch's: many tokens at once, and one token more.

    python benchmarks/encode.py [--specs SPEC …] [--tokens 4096] [--rounds 9] [--out DIR]

CPU time of one thread, which other work on the machine disturbs least. Many tokens: G values/s, K
and V of 8 heads, D = 128 and 64, fp32 in, random data; the native kernel, the torch body, and
torch's rotation alone as a matrix product take turns in each round. Decoding: K and V back in
fp32, the rotation undone. What no native kernel covers has torch's figure alone. One token:
microseconds of `store` for one layer's K and V (8 heads, D = 128), the whole path through Python,
on caches of 1k and of `--long` tokens, what `backend="auto"` chooses and torch in turns. Medians
and ratios in this run are printed, and written to DIR/encode.json and encode.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import about

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.cache.segments import SegmentList
from kvpact.errors import BackendUnavailable
from kvpact.kernels import CHUNK, StreamView, choose
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.encode import CodecEncoder, CpuEncoder
from kvpact.methods.fitted import FittedCodec
from kvpact.testing.data import by_name

SPECS = (
    "turboquant:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=2",
    "turboquant:bits=4,center=64",
    "trellis:bits=4",
    "trellis:bits=3",
    "trellis:bits=2",
    "trellis:bits=4,states=8",
    "int:bits=8",
    "int:bits=4",
    "fp8",
    "kivi:bits=2",
    "kvarn:bits=4",
    "turboquant:bits=4,mode=prod",
    "qjl",
    "polarquant",
)
HEADS = 8
Row = dict[str, object]


def rounds_of(
    calls: dict[str, Callable[[], object]], rounds: int, warm: int = 0
) -> dict[str, float]:
    """Return the median seconds of each call; all take turns in each round.

    Before each call `warm` more are made that are not timed: what ran before has emptied the
    processor's caches, and to microseconds that is much.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            for _ in range(warm):
                call()
            start = time.thread_time()
            call()
            if index:  # the first round warms up
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def many(spec: str, side: str, dim: int, tokens: int, rounds: int) -> tuple[Row, Row]:
    """Time encoding and decoding of `tokens` tokens."""
    method = parse_spec(spec).key
    codec = (method.key_codec if side == "k" else method.value_codec)(dim, torch.float32)
    x = torch.randn(1, HEADS, tokens, dim, generator=torch.Generator().manual_seed(0))
    if isinstance(codec, FittedCodec):
        codec = codec.fit(x[:, :, : codec.learns_from])
    store = SegmentList(codec, 1, HEADS, torch.device("cpu")).grown(tokens, 0)
    size = store.segment_tokens
    segments = [store.segment(index) for index in range(-(-tokens // size))]
    matrix = torch.randn(dim, dim)

    def body() -> None:
        # In chunks, as a prefill comes.
        for start in range(0, tokens, size):
            arrays = codec.encode(x[:, :, start : start + size])
            for field in codec.fields:
                field.write(segments[start // size][field.name], 0, arrays[field.name])

    encoding: dict[str, Callable[[], object]] = {}
    if not CodecEncoder(codec).reason:
        encoder = CpuEncoder(library(), codec)
        encoding["native"] = lambda: encoder.write(x, store.source(), 0)
    encoding |= {"torch": body, "matmul": lambda: x @ matrix}
    # The first round fills the slots; that later ones OR the same bits into them costs the same.
    encoded = rounds_of(encoding, rounds)
    view = StreamView(codec, store.source(), tokens, x[:, :, :0], None, None, 0, check)

    out = torch.empty_like(x)

    def back(backend: str) -> Callable[[], None]:
        plan = choose(backend).stream(codec, x.device, x.dtype)

        def run() -> None:
            for start in range(0, tokens, CHUNK):
                end = min(start + CHUNK, tokens)
                plan.decode(view, start, end, out[:, :, start:end])

        return run

    decoding = {}
    if codec.form is not None and codec.form.kind:
        decoding = {"native": back("cpu"), "torch": back("torch")}
    both = (encoded, rounds_of(decoding, rounds) if decoding else {})
    place = {"spec": spec, "side": side, "dim": dim}
    return tuple({**place, **speeds(x.numel(), times)} for times in both)


def check() -> None:
    """Let every view be read."""


def speeds(count: int, times: dict[str, float]) -> Row:
    """Return G values/s, and the ratio of native over torch, where there is a native kernel."""
    found: Row = {name: count / seconds / 1e9 for name, seconds in times.items()}
    return {**found, "ratio": times["torch"] / times["native"]} if "native" in times else found


def one_token(spec: str, held: tuple[int, ...], rounds: int) -> Row:
    """Time `store` of one token."""
    geometry = CacheGeometry(1, HEADS, 128, None, torch.float32)
    k, v = torch.randn(2, 1, HEADS, 1, 128, generator=torch.Generator().manual_seed(1))
    calls: dict[str, Callable[[], object]] = {}
    for kernel, count in (("auto", held[0]), ("auto", held[-1]), ("torch", held[0])):
        cache = create_cache(spec, geometry, backend=kernel)
        for start in range(0, count, 4096):
            part = torch.randn(2, 1, HEADS, min(4096, count - start), 128)
            cache.store(0, **by_name(*part))
        calls[f"{kernel} at {count}"] = lambda cache=cache: cache.store(0, k=k, v=v)
    times = rounds_of(calls, rounds, warm=2)
    found: Row = {name: seconds * 1e6 for name, seconds in times.items()}
    first, last, body = times.values()
    return {"spec": spec, **found, "ratio": body / first, "growth": last / first}


def table(rows: list[Row]) -> str:
    """Return rows as a Markdown table; what a row lacks stays empty."""
    columns = [*max(rows, key=len)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        found = (row.get(name, "") for name in columns)
        cells = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in found)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        level = library().level
    except BackendUnavailable as error:
        raise SystemExit(f"nothing to compare: {error}") from None
    torch.set_num_threads(1)
    where = about(level=level, threads=1)
    rows = [
        many(spec, side, dim, options.tokens, options.rounds)
        for spec in options.specs
        for dim in (128, 64)
        for side in "kv"
    ]
    encoded, decoded = [row for row, _ in rows], [row for _, row in rows if "ratio" in row]
    steps = [one_token(spec, (1024, options.long), 40 * options.rounds) for spec in options.specs]
    head = ", ".join(f"{key}: {value}" for key, value in where.items())
    text = (
        f"# Encoding and decoding\n\n{head}\n\n"
        "Many tokens, G values/s; `ratio`: over the torch body.\n\n"
        f"{table(encoded)}\nDecoding, G values/s.\n\n{table(decoded)}\n"
        f"One token's K and V, us; `growth`: the long cache over the short one.\n\n"
        f"{table(steps)}"
    )
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "encode.md").write_text(text)
        found = {"about": where, "many": encoded, "decoded": decoded, "one": steps}
        (options.out / "encode.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
