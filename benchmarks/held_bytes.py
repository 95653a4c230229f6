"""Bytes that caches hold at every length, beside those of an exact cache of the same dtype.

    python benchmarks/held_bytes.py [--tokens 4096] [--dtype bfloat16]
        [--out benchmarks/results/bytes]

A layer of each model's shape gets one token after the other. `memory_usage` counts every tensor,
room and what is learnt included; an exact cache holds K and V, and nothing else. Printed are the
largest share of its bytes at any length, and the share at some lengths.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from machine import about, head, save

from kvpact import CacheGeometry, create_cache

MODELS = {"smollm2": (3, 64), "gemma3": (1, 256)}
SPECS = (
    *(f"turboquant:bits={bits}" for bits in (2, 3, 4)),
    *(f"trellis:bits={bits}" for bits in (2, 3, 4)),
    "int:bits=8",
)
SHOWN = (1, 64, 96, 128, 256, 512, 1024, 4096)

Row = dict[str, Any]


def shares(spec: str, heads: int, dim: int, tokens: int, dtype: torch.dtype) -> list[float]:
    """Return the share of an exact cache's bytes after each token."""
    generator = torch.Generator().manual_seed(1)
    cache = create_cache(spec, CacheGeometry(1, heads, dim, dtype=dtype))
    found = []
    for count in range(1, tokens + 1):
        k, v, q = torch.randn(3, 1, heads, 1, dim, generator=generator).to(dtype)
        cache.attend(0, k=k, v=v, q=q)
        found.append(cache.memory_usage() / (2 * count * heads * dim * dtype.itemsize))
    return found


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure every spec on layers of both shapes."""
    dtype = getattr(torch, options.dtype)
    return [
        {"model": model, "spec": spec, "shares": shares(spec, *shape, options.tokens, dtype)}
        for model, shape in MODELS.items()
        for spec in SPECS
    ]


def markdown(rows: list[Row], found: dict[str, object], tokens: int) -> str:
    """Return a table."""
    lengths = [count for count in SHOWN if count <= tokens]
    names = " | ".join(f"{count:,}" for count in lengths)
    lines = [head(found), "", f"| model | spec | largest share | {names} |"]
    lines.append("|---|---|" + "--:|" * (len(lengths) + 1))
    for row in rows:
        held = row["shares"]
        at = " | ".join(f"{held[count - 1]:.3f}" for count in lengths)
        lines.append(f"| {row['model']} | `{row['spec']}` | {max(held):.3f} | {at} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print; write DIR/held_bytes.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = about(dtype=options.dtype)
    with torch.no_grad():
        rows = measure(options)
    report = markdown(rows, found, options.tokens)
    print(report)
    if options.out:
        brief = [
            {
                "model": row["model"],
                "spec": row["spec"],
                "largest": round(max(row["shares"]), 4),
                "shares": {n: round(row["shares"][n - 1], 4) for n in SHOWN if n <= options.tokens},
            }
            for row in rows
        ]
        save(options.out, "held_bytes", found, brief, report)


if __name__ == "__main__":
    main()
