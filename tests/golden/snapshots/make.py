"""Write the golden snapshots: `python tests/golden/snapshots/make.py`. Never run by the tests.

Those of `EARLY` were written when tokens were packed before they left the window: no cache writes
them any more.
"""

from pathlib import Path

import numpy as np
import torch

from kvpact import AttendConfig, CacheGeometry, KeyOffset, PagedKVCache, create_cache
from kvpact.snapshot import Identity, RecordState
from kvpact.snapshot.manifest import LATE, VERSION, WITH_ENERGIES, WITH_OFFSETS, WITH_RECORDS

FOLDER = Path(__file__).parent
GEOMETRY = CacheGeometry(2, 2, 16, 8, dtype=torch.float16)
EARLY = {
    "turboquant": "turboquant:bits=4,window=20",
    "cut-group": "kivi:bits=2,sinks=2,window=5/int:bits=8",
    "learnt": "vq:codebook_size=16,window=3/lowrank:rank=4,sinks=0", "paged": "int:bits=4",
    "offset": "turboquant:bits=3,sinks=2,window=9", "energies": "trellis:bits=3,sinks=2,window=5",
}  # fmt: skip
CASES = EARLY | {
    "waiting": "kivi:bits=2,sinks=2,window=40/turboquant:bits=4,window=3",
    "learning": "trellis:bits=3,sinks=2,window=5",
}
HELD = dict.fromkeys(CASES, 69) | {"cut-group": 50, "energies": 40, "learning": 60}
"""Tokens before; one more was appended at least, and rolled back."""
VERSIONS = dict.fromkeys(CASES, (LATE, LATE)) | {
    **dict.fromkeys(EARLY, (VERSION, VERSION)),
    "offset": (WITH_OFFSETS, WITH_OFFSETS),
    "energies": (WITH_ENERGIES, VERSION),
}
"""Before and after 40 more tokens."""
OFFSET = KeyOffset(
    (1.0, 0.125, 0.003), ((0, 8), (3, 11), (6, 14)),
    (((30.0, -7.5), (11.0, 2.0), (-90.0, 41.0)), ((0.5, 60.0), (-13.0, 8.0), (0.0, 0.0))),
    scaling=1.25,
)  # fmt: skip


def inputs(count: int, seed: int, rows: int = 2) -> list[torch.Tensor]:
    """Return K, V and Q; numpy's generator gives the same numbers everywhere."""
    rng = np.random.default_rng(seed)
    shapes = ((2, 16), (2, 8), (4, 16))
    numbers = (rng.standard_normal((rows, heads, count, dim)) for heads, dim in shapes)
    return [torch.from_numpy(x).half() for x in numbers]


def grow(cache, count: int, seed: int, padding: list[int] | None = None) -> None:
    """Append tokens to both layers."""
    config = AttendConfig(padding=None if padding is None else torch.tensor(padding))
    for layer in range(2):
        cache.prefill(layer, *inputs(count, seed + layer), config)


def cache_for(name: str):
    """Return an empty cache."""
    if name == "paged":
        return PagedKVCache(CASES[name], GEOMETRY, 12).view()
    offsets = dict.fromkeys(range(2), OFFSET) if name == "offset" else None
    return create_cache(CASES[name], GEOMETRY, key_offsets=offsets)


def records() -> list[RecordState]:
    """Return a window of 5 tokens and a state, of a model's layers 0 and 3."""
    (k, v), (state, _, _) = inputs(5, 11)[:2], inputs(4, 12)
    window = [RecordState(0, name, x, 0, 9) for name, x in (("keys", k), ("values", v))]
    return [*window, RecordState(3, "recurrent_states.1", state.float(), 0, 9)]


def main() -> None:
    """Write the files that are not there, before and after 40 more tokens."""
    for name in CASES:
        cache = cache_for(name)
        grow(cache, {"energies": 41, "learning": 61}.get(name, 70), 1, [3, 0])
        cache.truncate(HELD[name])
        for when, version in zip(("before", "after"), VERSIONS[name], strict=True):
            path = FOLDER / f"{name}-{when}-v{version}.safetensors"
            if not path.exists():
                ids = torch.arange(cache.seq_len(0)).expand(2, -1)
                who = Identity(model="m", adapter=None, tenant="t")
                snapshot = cache.snapshot(token_ids=ids, identity=who)
                if snapshot.manifest.version != version or name in EARLY:
                    raise SystemExit(f"{path.name} can't be written any more: restore it")
                snapshot.save(path)
                path.chmod(0o644)
                print(f"{path.name}: {path.stat().st_size:,} bytes")
            grow(cache, 40, 7)
    path = FOLDER / f"records-v{WITH_RECORDS}.safetensors"
    if not path.exists():
        cache = cache_for("waiting")
        grow(cache, 9, 1, [3, 0])
        cache.snapshot_with(records()).save(path)
        path.chmod(0o644)


if __name__ == "__main__":
    main()
