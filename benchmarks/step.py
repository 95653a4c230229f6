"""What a layer's step costs beside its kernels, and what it costs while a model runs.

    python benchmarks/step.py [--rounds 15] [--threads 1] [--out DIR] [fixed] [batch] [model]

``fixed``: one new token, 64 tokens held, 9 query heads and 3 KV heads of 64. The time of
`cache.attend`, and how much of it is spent outside of the native library: contiguous, and one row
of a `PagedView`. ``batch``: 8 sequences of 1,024 tokens, a paged batch beside a contiguous one.
``model``: 16,384 tokens, 32 query heads and 8 KV heads of 128, with 300 MB of other memory read
between two calls, as a model does that streams its weights; beside it a ring of caches alone.

Candidates take turns in each round. Medians and quartiles in microseconds are printed, and written
to DIR/step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import torch

from kvpact import CacheGeometry, CompressedKVCache, PagedKVCache, create_cache
from kvpact.kernels.cpu import library

SPECS = ("turboquant:bits=4", "int:bits=8", "turboquant:bits=4,window=32", "kivi:bits=2")
ENTRIES = ("attend", "attend_rows", "encode", "learn", "decode", "magnitude", "step")
STEPS = 48
OTHER = 300_000_000
Made = tuple[CompressedKVCache, Callable[[], object]]


@contextmanager
def timed_library() -> Iterator[list[int]]:
    """Add up the nanoseconds that are spent in the native library."""
    spent, native = [0], library()
    real = {name: getattr(native, name) for name in ENTRIES if hasattr(native, name)}

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            begin = perf_counter_ns()
            result = call(*args)
            spent[0] += perf_counter_ns() - begin
            return result

        return run

    for name, call in real.items():
        setattr(native, name, timed(call))
    try:
        yield spent
    finally:
        for name, call in real.items():
            setattr(native, name, call)


def filled(spec: str, rows: int, held: int, heads: int, dim: int, layout: str) -> CompressedKVCache:
    """Return a cache, or a view of sequences on pages, that holds random tokens."""
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    generator = torch.Generator().manual_seed(held)
    if layout == "paged":
        pages = rows * (held // 64 + 4)
        pool = PagedKVCache(spec, geometry, num_pages=pages, page_size=128)
        cache = pool.view([pool.allocate() for _ in range(rows)])
    else:
        cache = create_cache(spec, geometry)
    for start in range(0, held, 512):
        size = (rows, heads, min(512, held - start), dim)
        cache.prefill(0, *(torch.randn(size, generator=generator) for _ in "kv"))
    return cache


def steps(
    cache: CompressedKVCache,
    rows: int,
    heads: int,
    groups: int,
    dim: int,
    count: int,
    spent: Sequence[int] = (0,),
) -> list[float]:
    """Return the microseconds of each of `count` steps of one token, less what `spent` says."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, 2, rows, heads, 1, dim, generator=generator)
    queries = torch.randn(count, rows, heads * groups, 1, dim, generator=generator)
    triples = [(k, v, q) for (k, v), q in zip(tokens, queries, strict=True)]
    times = []
    for k, v, q in triples:
        begin, before = perf_counter_ns(), spent[0]
        cache.attend(0, k=k, v=v, q=q)
        times.append((perf_counter_ns() - begin - (spent[0] - before)) / 1000)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return median, quartiles and the minimum."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median": middle, "q1": low, "q3": high, "least": min(times)}


def fixed(rounds: int) -> dict[str, dict[str, float]]:
    """Measure one token on 64: the whole call, and what of it is not the library's."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for spec in SPECS:
            for layout in ("contiguous", "paged"):
                name = f"{spec}, {layout}"
                whole = steps(filled(spec, 1, 64, 3, 64, layout), 1, 3, 3, 64, STEPS)
                found.setdefault(name, []).extend(whole)
                cache = filled(spec, 1, 64, 3, 64, layout)
                with timed_library() as spent:
                    rest = steps(cache, 1, 3, 3, 64, STEPS, spent)
                found.setdefault(f"{name}: outside of the library", []).extend(rest)
    return {name: summary(times) for name, times in found.items()}


def batch(rounds: int) -> dict[str, dict[str, float]]:
    """Measure a paged batch beside a contiguous one."""
    found: dict[str, list[float]] = {}
    for shape, (heads, groups, dim) in {"9/3 x 64": (3, 3, 64), "32/8 x 128": (8, 4, 128)}.items():
        made = {
            layout: filled("turboquant:bits=4", 8, 1024, heads, dim, layout)
            for layout in ("contiguous", "paged")
        }
        for _ in range(rounds):
            for layout, cache in made.items():
                times = steps(cache, 8, heads, groups, dim, 8)
                found.setdefault(f"8 x 1,024, {shape}, {layout}", []).extend(times)
    return {name: summary(times) for name, times in found.items()}


def model(rounds: int) -> dict[str, dict[str, float]]:
    """Measure steps of a long cache, after other memory was read and in a ring of caches."""
    heads, groups, dim = 8, 4, 128
    other = torch.zeros(OTHER // 4)
    native, found = library(), {}
    for layout in ("contiguous", "paged"):
        ring = [filled("turboquant:bits=4", 1, 16384, heads, dim, layout) for _ in range(4)]
        for cache in ring:
            steps(cache, 1, heads, groups, dim, 4)
        alone, streamed = [], []
        for index in range(rounds * len(ring)):
            alone += steps(ring[index % len(ring)], 1, heads, groups, dim, 1)
        for index in range(rounds):
            native.read([other.data_ptr()], OTHER, 1)
            streamed += steps(ring[index % len(ring)], 1, heads, groups, dim, 1)
        found[f"16,384 tokens, {layout}: a ring of caches"] = summary(alone)
        found[f"16,384 tokens, {layout}: 300 MB of other memory between"] = summary(streamed)
    return found


PARTS = {"fixed": fixed, "batch": batch, "model": model}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, dict[str, float]] = {}
    for part in options.parts:
        found |= PARTS[part](options.rounds)
    for name, numbers in found.items():
        print(f"{name:70}", "  ".join(f"{key} {value:8.1f}" for key, value in numbers.items()))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "step.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
