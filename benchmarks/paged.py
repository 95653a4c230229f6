"""Pages against the contiguous cache: appending, and reading all slots, as ratios in one run.

    python benchmarks/paged.py [--tokens 4096] [--rounds 9] [--threads 1] [--batches 1 8 32]

One sequence, one layer, 8 KV heads, D = 128. *append* stores T tokens in pieces of 64; *attend* is
one decode step over all of them, *gather* decompresses them all. Both layouts take turns; medians
and quartiles are reported.

Then decode steps of batches of sequences, 32 query heads: their lengths go from a half to three
halves of --length, a row of the contiguous batch has --length tokens, so that both read as much.
"""

from typing import Any

import runner
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache

SPECS = ["none", "int:bits=8", "turboquant:bits=4", "turboquant:bits=3,center=64", "kivi:bits=2"]
BATCH = "turboquant:bits=4"
LAYOUTS, HEADS, DIM, PIECE = ("contiguous", "paged"), 8, 128, 64
GEOMETRY = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)


def step_of(layout: str, batch: int, length: int) -> runner.Call:
    """Return a decode step of a batch that holds `batch * length` tokens."""
    generator = torch.Generator().manual_seed(batch)
    if layout == "paged":
        pages = 2 * batch * (length // 32 + 64)
        paged = PagedKVCache(BATCH, GEOMETRY, pages, 128)
        seqs = [paged.allocate() for _ in range(batch)]
        for i, seq in enumerate(seqs):
            held = length // 2 + (length * i // (batch - 1) if batch > 1 else length // 2)
            paged.append(0, {seq: tuple(torch.randn(2, HEADS, held, DIM, generator=generator))})
        cache = paged.view(seqs)
    else:
        cache = runner.filled(create_cache(BATCH, GEOMETRY), length, length, batch)
    k, v = torch.randn(2, batch, HEADS, 1, DIM, generator=generator)
    q = torch.randn(batch, 4 * HEADS, 1, DIM, generator=generator)
    return lambda: cache.attend(0, k=k, v=v, q=q)


def one_sequence(spec: str, layout: str, kvq: Any) -> dict[str, float]:
    """Return the seconds of each kind of work, on an empty cache with room for the tokens."""
    k, v, q = kvq
    tokens = k.shape[2]
    pages = {"num_pages": (tokens + 2) // 32 + 8} if layout == "paged" else {}
    cache = create_cache(spec, GEOMETRY, layout, **pages)
    last = {"k": k[:, :, :1], "v": v[:, :, :1]}

    def append() -> None:
        for start in range(0, tokens, PIECE):
            part = slice(start, start + PIECE)
            cache.prefill(0, k[:, :, part], v[:, :, part])

    def gather() -> None:
        assert cache.prefill(0, *last.values()).k.shape[2] == tokens + 2

    works = {"append": append, "attend": lambda: cache.attend(0, **last, q=q), "gather": gather}
    return {what: runner.turn_of(work)() for what, work in works.items()}


def main() -> None:
    options = runner.arguments(
        __doc__, tokens=4096, rounds=9, threads=1, batches=[1, 8, 32], length=[256, 1024],
        specs=SPECS,
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    rows = []
    for length in options.length:
        for batch in options.batches:
            calls = {layout: step_of(layout, batch, length) for layout in LAYOUTS}
            turns = {name: runner.turn_of(call, best_of=4) for name, call in calls.items()}
            times = runner.in_turns(turns, 4 * options.rounds, warm=0)
            place = {"work": f"batch of {batch}, {length} tokens each"}
            rows += runner.compared(times, "contiguous", **place)
    draw = torch.Generator().manual_seed(0)
    kvq = [torch.randn(1, HEADS, n, DIM, generator=draw) for n in (options.tokens,) * 2 + (1,)]
    for spec in options.specs:
        turns = {
            name: lambda name=name, spec=spec: one_sequence(spec, name, kvq) for name in LAYOUTS
        }
        found = runner.in_turns(turns, options.rounds)
        for what in ("append", "attend", "gather"):
            times = {layout: [each[what] for each in rounds] for layout, rounds in found.items()}
            rows += runner.compared(times, "contiguous", work=f"{spec}, {what}")
    body = runner.comparison(rows, "contiguous", "work")
    runner.report(options, "paged", rows, body, ("tokens", "threads"))


if __name__ == "__main__":
    main()
