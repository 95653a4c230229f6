"""What a layer's step costs beside its kernels, and what it costs while a model runs.

    python benchmarks/step.py [--rounds 15] [--threads 1] [--out DIR] [fixed] [model]

``fixed``: one new token, 64 tokens held, 9 query heads and 3 KV heads of 64. The time of
`cache.attend`, and how much of it is spent outside of the native library: contiguous, and one row
of a `PagedView`.
``model``: 16,384 tokens, 32 query heads and 8 KV heads of 128, with 300 MB of other memory read
between two calls, as a model does that streams its weights; beside it a ring of caches alone.

Candidates take turns in each round. Medians and quartiles in microseconds are printed, and written
to DIR/step.json. `paged.py` has batches.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter

import runner
import torch

from kvpact import CacheGeometry, CompressedKVCache, PagedKVCache, create_cache
from kvpact.kernels.cpu import library

SPECS = ("turboquant:bits=4", "int:bits=8", "turboquant:bits=4,window=32", "kivi:bits=2")
ENTRIES = ("attend", "attend_rows", "encode", "learn", "decode", "magnitude", "step")
LAYOUTS, STEPS, OTHER = ("contiguous", "paged"), 48, 300_000_000
Times = dict[str, list[float]]


def filled(spec: str, held: int, heads: int, dim: int, layout: str) -> CompressedKVCache:
    """Return a cache, or a view of a sequence on pages, that holds random tokens."""
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    if layout == "paged":
        pool = PagedKVCache(spec, geometry, num_pages=held // 64 + 4, page_size=128)
        cache = pool.view([pool.allocate()])
    else:
        cache = create_cache(spec, geometry)
    return runner.filled(cache, held, 512)


def steps(
    cache: CompressedKVCache, groups: int, count: int, spent: dict[str, float] | None = None
) -> list[float]:
    """Return the seconds of each of `count` steps of one token, less what is `spent` elsewhere."""
    heads, dim = cache.geometry.num_kv_heads, cache.geometry.head_dim
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, 2, 1, heads, 1, dim, generator=generator)
    queries = torch.randn(count, 1, heads * groups, 1, dim, generator=generator)
    times, spent = [], spent or {}
    for (k, v), q in zip(tokens, queries, strict=True):
        begin, before = perf_counter(), sum(spent.values())
        cache.attend(0, k=k, v=v, q=q)
        times.append(perf_counter() - begin - (sum(spent.values()) - before))
    return times


def outside(spec: str, layout: str) -> list[float]:
    """Return the seconds of each of some steps that are not the native library's."""
    cache = filled(spec, 64, 3, 64, layout)
    with runner.watched(library(), ENTRIES) as spent:
        return steps(cache, 3, STEPS, spent)


def fixed(rounds: int) -> Times:
    """Measure one token on 64: the whole call, and what of it is not the library's."""
    turns = {}
    for spec in SPECS:
        for layout in LAYOUTS:
            whole = partial(filled, spec, 64, 3, 64, layout)
            turns[f"{spec}, {layout}"] = lambda whole=whole: steps(whole(), 3, STEPS)
            name = f"{spec}, {layout}: outside of the library"
            turns[name] = partial(outside, spec, layout)
    found = runner.in_turns(turns, rounds, warm=0)
    return {name: [x for times in each for x in times] for name, each in found.items()}


def model(rounds: int) -> Times:
    """Measure steps of a long cache, after other memory was read and in a ring of caches."""
    other, found = torch.zeros(OTHER // 4), {}
    for layout in LAYOUTS:
        ring = [filled("turboquant:bits=4", 16384, 8, 128, layout) for _ in range(4)]
        for cache in ring:
            steps(cache, 4, 4)
        alone, streamed = [], []
        for index in range(rounds * len(ring)):
            alone += steps(ring[index % len(ring)], 4, 1)
        for index in range(rounds):
            library().read([other.data_ptr()], OTHER, 1)
            streamed += steps(ring[index % len(ring)], 4, 1)
        found[f"16,384 tokens, {layout}: a ring of caches"] = alone
        found[f"16,384 tokens, {layout}: 300 MB of other memory between"] = streamed
    return found


PARTS = {"fixed": fixed, "model": model}


def main() -> None:
    """Measure and print."""
    options = runner.arguments(__doc__, "parts", parts=PARTS, rounds=15, threads=1)
    torch.set_num_threads(options.threads)
    rows = []
    for part in options.parts:
        for name, times in PARTS[part](options.rounds).items():
            low, middle, high = runner.quartiles(times, 1e6)
            figures = {"median": middle, "q1": low, "q3": high, "least": min(times) * 1e6}
            rows.append({"what": name, **figures})
    cells = [[x if isinstance(x, str) else f"{x:.1f}" for x in row.values()] for row in rows]
    body = runner.table("microseconds | median | q1 | q3 | least", cells)
    runner.report(options, "step", rows, body, ("threads", "rounds"))


if __name__ == "__main__":
    main()
