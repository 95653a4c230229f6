"""Pages against the contiguous cache: appending, and reading all slots, as ratios in one run.

    python benchmarks/paged.py [--tokens 4096] [--repeats 9] [--threads 1] [--batches 1 8 32]

One sequence, one layer, 8 KV heads, D = 128. *append* stores T tokens in pieces of 64; *attend* is
one decode step over all of them, *gather* decompresses them all. Both layouts take turns; medians
and quartiles are reported.

Then decode steps of batches of sequences, 32 query heads: their lengths go from a half to three
halves of --length, a row of the contiguous batch has --length tokens, so that both read as much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.testing.data import by_name

SPECS = ("none", "int:bits=8", "turboquant:bits=4", "turboquant:bits=3,center=64", "kivi:bits=2")
HEADS, DIM, PIECE = 8, 128, 64


def make(spec: str, layout: str, tokens: int):
    """Return an empty cache of one layer that has room for the tokens."""
    geometry = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
    pages = {"num_pages": tokens // 32 + 8} if layout == "paged" else {}
    return create_cache(spec, geometry, layout, **pages)


def append_all(cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store the tokens in pieces."""
    for start in range(0, k.shape[2], PIECE):
        part = slice(start, start + PIECE)
        cache.prefill(0, k[:, :, part], v[:, :, part])


def gather(cache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store one token and decompress all."""
    result = cache.prefill(0, k, v)
    assert result.k.shape[2] == result.v.shape[2]


def timed(call: Callable[[], object]) -> float:
    """Return seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_of(layout: str, batch: int, length: int) -> Callable[[], object]:
    """Return a decode step of a batch that holds `batch * length` tokens."""
    generator = torch.Generator().manual_seed(batch)
    geometry = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
    if layout == "paged":
        pages = 2 * batch * (length // 32 + 64)
        paged = PagedKVCache("turboquant:bits=4", geometry, pages, 128)
        seqs = [paged.allocate() for _ in range(batch)]
        for i, seq in enumerate(seqs):
            held = length // 2 + (length * i // (batch - 1) if batch > 1 else length // 2)
            paged.append(0, {seq: tuple(torch.randn(2, HEADS, held, DIM, generator=generator))})
        cache = paged.view(seqs)
    else:
        cache = create_cache("turboquant:bits=4", geometry)
        cache.store(0, **by_name(*torch.randn(2, batch, HEADS, length, DIM, generator=generator)))
    k, v = torch.randn(2, batch, HEADS, 1, DIM, generator=generator)
    q = torch.randn(batch, 4 * HEADS, 1, DIM, generator=generator)
    return lambda: cache.attend(0, k=k, v=v, q=q)


def batches(sizes: list[int], length: int, repeats: int) -> None:
    """Measure and print decode steps of batches."""
    for batch in sizes:
        calls = {layout: step_of(layout, batch, length) for layout in ("contiguous", "paged")}
        times: dict[str, list[float]] = {layout: [] for layout in calls}
        for _ in range(4 * repeats):
            for layout, call in calls.items():
                times[layout].append(min(timed(call) for _ in range(4)))
        ratios = [b / a for a, b in zip(times["contiguous"], times["paged"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        contiguous, paged = (statistics.median(times[layout]) * 1e3 for layout in calls)
        line = f"{f'batch of {batch}, {length} tokens each':38}{contiguous:14.3f}{paged:10.3f}"
        print(f"{line}{middle:7.2f}{low:6.2f}-{high:.2f}")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--length", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--only-batches", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, HEADS, options.tokens, DIM, generator=generator)
    q = torch.randn(1, HEADS, 1, DIM, generator=generator)
    print(f"{options.tokens} tokens, {options.threads} thread(s), torch {torch.__version__}")
    print(f"{'':38}{'contiguous ms':>14}{'paged ms':>10}{'ratio':>7}{'quartiles':>12}")
    for length in options.length:
        batches(options.batches, length, options.repeats)
    for spec in () if options.only_batches else SPECS:
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.repeats + 1):
            for layout in ("contiguous", "paged"):
                cache = make(spec, layout, options.tokens + 2)
                for what, call in (
                    ("append", lambda cache=cache: append_all(cache, k, v)),
                    (
                        "attend",
                        lambda cache=cache: cache.attend(0, k=k[:, :, :1], v=v[:, :, :1], q=q),
                    ),
                    ("gather", lambda cache=cache: gather(cache, k[:, :, :1], v[:, :, :1])),
                ):
                    times.setdefault((what, layout), []).append(timed(call))
        for what in ("append", "attend", "gather"):
            contiguous, paged = (times[what, layout][1:] for layout in ("contiguous", "paged"))
            ratios = [b / a for a, b in zip(contiguous, paged, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            print(
                f"{spec + ', ' + what:38.38}{statistics.median(contiguous) * 1e3:14.2f}"
                f"{statistics.median(paged) * 1e3:10.2f}{middle:7.2f}{low:6.2f}-{high:.2f}"
            )


if __name__ == "__main__":
    main()
