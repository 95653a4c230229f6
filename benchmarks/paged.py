"""Pages against the contiguous cache: appending, and reading all slots, as ratios in one run.

    python benchmarks/paged.py [--tokens 4096] [--repeats 9] [--threads 1]

One sequence, one layer, 8 KV heads, D = 128. *append* stores T tokens in pieces of 64; *attend* is
one decode step over all of them, *gather* decompresses them all. Both layouts take turns; medians
and quartiles are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvpact import CacheGeometry, create_cache

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


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, HEADS, options.tokens, DIM, generator=generator)
    q = torch.randn(1, HEADS, 1, DIM, generator=generator)
    print(f"{options.tokens} tokens, {options.threads} thread(s), torch {torch.__version__}")
    print(f"{'':38}{'contiguous ms':>14}{'paged ms':>10}{'ratio':>7}{'quartiles':>12}")
    for spec in SPECS:
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.repeats + 1):
            for layout in ("contiguous", "paged"):
                cache = make(spec, layout, options.tokens + 2)
                for what, call in (
                    ("append", lambda cache=cache: append_all(cache, k, v)),
                    ("attend", lambda cache=cache: cache.attend(0, k[:, :, :1], v[:, :, :1], q)),
                    ("gather", lambda cache=cache: gather(cache, k[:, :, :1], v[:, :, :1])),
                ):
                    times.setdefault((what, layout), []).append(timed(call))
        for what in ("append", "attend", "gather"):
            contiguous, paged = (times[what, layout][1:] for layout in ("contiguous", "paged"))
            ratios = [b / a for a, b in zip(contiguous, paged, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{spec + ', ' + what:38.38}{statistics.median(contiguous) * 1e3:14.2f}"
                f"{statistics.median(paged) * 1e3:10.2f}{middle:7.2f}{low:6.2f}-{high:.2f}"
            )


if __name__ == "__main__":
    main()
