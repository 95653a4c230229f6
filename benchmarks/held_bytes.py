"""Bytes that caches hold at every length, beside those of an exact cache of the same dtype.

    python benchmarks/held_bytes.py [--tokens 4096] [--dtype bfloat16] …

A layer of each model's shape gets one token after the other. `memory_usage` counts every tensor,
room and what is learnt included; an exact cache holds K and V, and nothing else. Printed are the
largest share of its bytes at any length, and the share at some lengths.
"""

import runner
import torch

from kvpact import CacheGeometry, create_cache

MODELS = {"smollm2": (3, 64), "gemma3": (1, 256)}
SPECS = (
    *(f"turboquant:bits={bits}" for bits in (2, 3, 4)),
    *(f"trellis:bits={bits}" for bits in (2, 3, 4)),
    "int:bits=8",
)
SHOWN = (1, 64, 96, 128, 256, 512, 1024, 4096)


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


def main() -> None:
    options = runner.arguments(__doc__, tokens=4096, dtype="bfloat16")
    torch.set_num_threads(1)
    lengths = [count for count in SHOWN if count <= options.tokens]
    rows, cells = [], []
    for model, shape in MODELS.items():
        for spec in SPECS:
            found = shares(spec, *shape, options.tokens, getattr(torch, options.dtype))
            at = {count: round(found[count - 1], 4) for count in lengths}
            most = round(max(found), 4)
            rows.append({"model": model, "spec": spec, "largest": most, "shares": at})
            numbers = (f"{x:.3f}" for x in (most, *at.values()))
            cells.append([model, f"`{spec}`", *numbers])
    columns = ["model", "spec", "largest share", *(f"{count:,}" for count in lengths)]
    runner.report(options, "held_bytes", rows, runner.table(columns, cells, 2), ("dtype",))


if __name__ == "__main__":
    main()
