"""Attention with many query rows per KV head, native beside torch.

    python benchmarks/rows.py [--tokens 4096] [--queries 1 2 4 …] [--shapes A B MLA] [--out DIR]

Chunks of a prompt, speculative checks, latents: as many queries as --queries say over T cached
tokens of one layer, fp32. A: 32 query heads, 8 KV heads, D = 128; B: 9, 3, 64; MLA: 16 query heads
over latents of 512 and rotated keys of 64. ``torch`` is the torch body over the same slots; ``few``
and ``many`` are the native kernels for few and for many rows (the dispatcher's choice is marked);
latents have the second one alone. All take turns in each round; medians, quartiles and ratios in
this run are written to DIR/rows.json and DIR/rows.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attend_ours import copies, past
from attend_rounds import measure, turn_of
from machine import processor

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import BackendUnavailable
from kvpact.kernels import AttendCall
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import library
from kvpact.testing.data import by_name

SHAPES = {"A": (8, 4, 128, None), "B": (3, 3, 64, None), "MLA": (1, 16, 512, 64)}
NEVER = 1 << 30


def views(spec: str, shape: str, tokens: int, ring: int, kernel: str) -> list[Any]:
    """Return plans and views of the first layer of caches that hold the same tokens."""
    heads, _, dim, rope = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    if rope:
        geometry = CacheGeometry.mla(1, dim, rope, torch.float32)
    first = create_cache(spec, geometry, backend=kernel)
    for start in range(0, tokens, 1024):
        size = (1, heads, min(1024, tokens - start))
        first.store(
            0, **by_name(*(torch.randn(*size, d, generator=generator) for d in (dim, rope or dim)))
        )
    caches = [first]
    for _ in range(copies(first.memory_usage(), ring) - 1):
        caches.append(first.fork())
        caches[-1].select(torch.tensor([0]))
    return [past(cache.entry(0)) for cache in caches]


def forced(rows: int, call: Callable[[], object]) -> Callable[[], object]:
    """Return a call whose kernel for many rows begins at `rows`."""

    def run() -> object:
        before, native.many_rows = native.many_rows, lambda *_: rows
        try:
            return call()
        finally:
            native.many_rows = before

    return run


def calls(
    spec: str, shape: str, tokens: int, queries: int, ring: int
) -> tuple[dict[str, list[Callable[[], object]]], str]:
    """Return the candidates, a call per cache of the ring, and which one the dispatcher takes."""
    heads, groups, dim, rope = SHAPES[shape]
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(1, heads * groups, queries, dim + (rope or 0), generator=generator)
    k, v = (torch.randn(1, heads, queries, d, generator=generator) for d in (dim, rope or dim))
    config = AttendConfig(softmax_scale=dim**-0.5)

    def over(kernel: str) -> tuple[list[Callable[[], object]], AttendCall]:
        found = views(spec, shape, tokens, ring, kernel)
        made = [(plan, AttendCall(view, k, v, q, config, None, bool(rope))) for plan, view in found]
        attending = [lambda plan=plan, call=call: plan.attend((call,)) for plan, call in made]
        return attending, made[0][1]

    natives, first = over("cpu")
    result = {"torch": over("torch")[0], "many": [forced(1, call) for call in natives]}
    if not rope:
        result["few"] = [forced(NEVER, call) for call in natives]
    many = groups * queries >= native.many_rows(library(), first)
    return result, "many" if many else "few"


def row_of(times: dict[str, list[float]], **about: Any) -> dict[str, Any]:
    """Return medians and quartiles in milliseconds."""
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    quartiles = {n: [x * 1e3 for x in statistics.quantiles(t, n=4)[::2]] for n, t in times.items()}
    return {**about, "ms": medians, "ms_quartiles": quartiles}


def markdown(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return a table per shape, format and thread count."""
    lines = ["# Attention with many query rows\n", ", ".join(f"{k}: {v}" for k, v in about.items())]
    keys = ("shape", "spec", "tokens", "threads")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        lines += [
            "\n## {}, `{}`, {} tokens, {} thread(s)\n".format(*key),
            "| queries | torch, ms (quartiles) | few rows, ms | many rows, ms | taken | "
            "torch / taken |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if tuple(row[k] for k in keys) != key:
                continue
            ms, taken = row["ms"], row["ms"][row["taken"]]
            told = {
                n: f"{ms[n]:.3f} ({low:.3f}-{high:.3f})"
                for n, (low, high) in row["ms_quartiles"].items()
            }
            lines.append(
                f"| {row['queries']} | {told['torch']} | {told.get('few', '-')} | {told['many']} | "
                f"{row['taken']} | {ms['torch'] / taken:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 17, 32, 64, 128, 512]
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--specs", nargs="+", default=["turboquant:bits=4", "int:bits=8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ring", type=int, default=48, help="megabytes of each candidate's ring")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    try:
        level = library().level
    except BackendUnavailable as error:
        raise SystemExit(f"no native kernels to measure: {error}") from None
    about = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "level": level,
        "rounds": options.rounds,
        "load at the start": round(os.getloadavg()[0], 1),
    }
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for spec in options.specs:
            for tokens in options.tokens:
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    for queries in options.queries:
                        found, taken = calls(spec, shape, tokens, queries, options.ring)
                        turns = {name: turn_of(ring) for name, ring in found.items()}
                        times = measure(turns, options.rounds)
                        case = {"shape": shape, "spec": spec, "tokens": tokens, "taken": taken}
                        rows.append(row_of(times, **case, threads=threads, queries=queries))
                        print(markdown(rows[-1:], about).splitlines()[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    (options.out / "rows.md").write_text(markdown(rows, about))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
