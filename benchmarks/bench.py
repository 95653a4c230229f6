"""Speed of one decode step of attention over a compressed cache, as ratios in one run.

    python benchmarks/bench.py [--tokens 1024 4096] [--repeats 15] [--threads 1]

One new token attends over a cache of T tokens, SmolLM2's geometry (9 query heads, 3 KV heads,
D = 64), fp32, CPU. The baselines in the same run: scaled_dot_product_attention and an explicit
grouped matmul, both over exact K and V. All candidates take turns in every round, so that a noisy
machine is noisy for all of them; medians and the spread (quartiles) are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvpact import AttendConfig, CacheGeometry, create_cache

SPECS = ("none", "fp8", "int:bits=8", "turboquant:bits=4", "kivi:bits=2", "kvarn:bits=3")
HEADS, KV_HEADS, DIM = 9, 3, 64


def baselines(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return exact attention in the two ways that torch is fast at."""
    groups = HEADS // KV_HEADS
    rows = q.reshape(1, KV_HEADS, groups, DIM) * DIM**-0.5
    return {
        "exact, sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, enable_gqa=True
        ),
        "exact, matmul": lambda: (rows @ k.mT).softmax(-1) @ v,
    }


def candidate(spec: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> Callable[[], object]:
    """Return a call that decodes one token and takes it back."""
    cache = create_cache(spec, CacheGeometry(1, KV_HEADS, DIM))
    cache.prefill(0, k, v)
    token, config, length = k[:, :, :1], AttendConfig(), k.shape[2]

    def step() -> None:
        cache.decode(0, token, v[:, :, :1], q, config)
        cache.truncate(length)

    return step


def main() -> None:
    """Measure and print a table for each context length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    for tokens in options.tokens:
        k, v = torch.randn(2, 1, KV_HEADS, tokens, DIM, generator=generator)
        q = torch.randn(1, HEADS, 1, DIM, generator=generator)
        calls = baselines(k, v, q) | {spec: candidate(spec, k, v, q) for spec in SPECS}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.repeats + 2):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        print(f"\n{tokens} tokens, {options.threads} thread(s), torch {torch.__version__}")
        print(f"{'':24}{'median ms':>10}{'quartiles':>18}{'x best exact':>14}")
        medians = {name: statistics.median(t[2:]) for name, t in times.items()}
        best = min(medians[name] for name in ("exact, sdpa", "exact, matmul"))
        for name, measured in times.items():
            low, _, high = statistics.quantiles(measured[2:], n=4, method="inclusive")
            spread = f"{low * 1e3:.2f}-{high * 1e3:.2f}"
            print(f"{name:24}{medians[name] * 1e3:10.2f}{spread:>18}{medians[name] / best:14.2f}")


if __name__ == "__main__":
    main()
