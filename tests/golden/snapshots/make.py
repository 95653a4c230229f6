"""Write the golden snapshots: `python tests/golden/snapshots/make.py`.

Never run by the tests. A snapshot of each format version stays readable for ever, and a cache goes
on from it as it did when the file was written. Files that are there stay.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache
from kvpact.snapshot import Identity
from kvpact.snapshot.manifest import VERSION

FOLDER = Path(__file__).parent
GEOMETRY = CacheGeometry(2, 2, 16, 8, dtype=torch.float16)
CASES = {
    "turboquant": "turboquant:bits=4,window=20",
    "cut-group": "kivi:bits=2,sinks=2,window=5/int:bits=8",
    "learnt": "vq:codebook_size=16,window=3/lowrank:rank=4,sinks=0",
    "paged": "int:bits=4",
}


def inputs(count: int, seed: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V; numpy's generator gives the same numbers everywhere."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((rows, 2, count, dim)) for dim in (16, 8))
    return torch.from_numpy(k).half(), torch.from_numpy(v).half()


def grow(cache, count: int, seed: int, padding: list[int] | None = None) -> None:
    """Append tokens to both layers."""
    config = AttendConfig(padding=None if padding is None else torch.tensor(padding))
    for layer in range(2):
        cache.prefill(layer, *inputs(count, seed + layer), None, config)


def cache_for(name: str):
    """Return an empty cache."""
    if name == "paged":
        return PagedKVCache(CASES[name], GEOMETRY, 12).view()
    return create_cache(CASES[name], GEOMETRY)


def main() -> None:
    """Write the files that are not there, before and after 40 more tokens."""
    for name in CASES:
        cache = cache_for(name)
        grow(cache, 70, 1, [3, 0])
        cache.truncate(50 if name == "cut-group" else 69)
        for when in ("before", "after"):
            path = FOLDER / f"{name}-{when}-v{VERSION}.safetensors"
            if not path.exists():
                ids = torch.arange(cache.seq_len(0)).expand(2, -1)
                who = Identity(model="m", adapter=None, tenant="t")
                cache.snapshot(token_ids=ids, identity=who).save(path)
                path.chmod(0o644)
                print(f"{path.name}: {path.stat().st_size:,} bytes")
            grow(cache, 40, 7)


if __name__ == "__main__":
    main()
