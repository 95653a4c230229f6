"""Saving and loading against a plain copy of the same bytes: snapshots, and prefixes in stores.

    python benchmarks/store.py [--tokens 3000] [--rounds 5]

One sequence of SmolLM2-135M's shape, random K and V. *memory* and
*directory* are prefix caches on a `MemoryStore` and a `DirectoryStore`, *file* is a snapshot. The
plain copy moves as many bytes: in memory, or to a file and back, with the same `fsync`. Both take
turns; medians are reported. *size* is all bytes stored over those of an fp16 cache.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runner
import torch

from kvpact import CacheGeometry, PrefixCache, Snapshot, create_cache
from kvpact.cache import ContiguousCache
from kvpact.stores import DirectoryStore, MemoryStore, Store

GEOMETRY = CacheGeometry(30, 3, 64, dtype=torch.float32)
SPECS = ("none", "int:bits=8", "turboquant:bits=4", "kivi:bits=2")


def filled(spec: str, geometry: CacheGeometry, tokens: int) -> ContiguousCache:
    """Return a cache that holds random tokens."""
    cache = create_cache(spec, geometry)
    assert isinstance(cache, ContiguousCache)
    shape = (2, 1, geometry.num_kv_heads, tokens, geometry.head_dim)
    for layer in range(geometry.num_layers):
        k, v = torch.randn(shape, generator=torch.Generator().manual_seed(layer))
        cache.store(layer, k=k, v=v)
    return cache


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and the result."""
    found = []
    return runner.turn_of(lambda: found.append(call()))(), found[0]


def store_times(store: Store, cache: ContiguousCache, ids: list[int]) -> tuple[float, float, int]:
    """Save a cache's prefix to an empty store and load it; return seconds and bytes stored."""
    prefixes = PrefixCache(store, cache, model="random")
    save, chunks = timed(lambda: prefixes.save(ids))
    empty = create_cache(cache.specs[0], cache.geometry)
    load, held = timed(lambda: PrefixCache(store, empty, model="random").load(ids))
    assert chunks and held == empty.seq_len(0) == chunks * prefixes.chunk, "nothing was loaded"
    return save, load, store.stats().bytes or 0


def file_times(path: Path, cache: ContiguousCache) -> tuple[float, float, int]:
    """Save a snapshot to a file, load it and restore a cache from it; seconds and bytes."""
    empty = create_cache(cache.specs[0], cache.geometry)
    save, _ = timed(lambda: cache.snapshot().save(path))
    load, _ = timed(lambda: empty.restore(Snapshot.load(path)))
    assert empty.seq_len(0) == cache.seq_len(0), "nothing was loaded"
    return save, load, path.stat().st_size


def copy_times(path: Path | None, size: int) -> tuple[float, float]:
    """Copy as many bytes: in memory, or to a file and back; return seconds of both ways."""
    data = os.urandom(1 << 20) * (size >> 20) + bytes(size & 0xFFFFF)
    if path is None:
        return timed(lambda: bytes(bytearray(data)))[0] / 2, timed(lambda: bytearray(data))[0]

    def write() -> None:
        with open(path, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    save, (load, read) = timed(write)[0], timed(path.read_bytes)
    assert len(read) == size
    return save, load


def measure(cache: ContiguousCache, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return, by place, bytes, seconds to save and load, and their ratios to a plain copy's."""
    ids, rows = list(range(cache.seq_len(0))), {}
    folder.mkdir(exist_ok=True)
    for place in ("memory", "directory", "file"):

        def turn(place=place) -> tuple[float, ...]:
            with tempfile.TemporaryDirectory(dir=folder) as name:
                path = Path(name) / place
                if place == "file":
                    save, load, size = file_times(path, cache)
                else:
                    with MemoryStore() if place == "memory" else DirectoryStore(path) as store:
                        save, load, size = store_times(store, cache, ids)
                plain = copy_times(None if place == "memory" else folder / "plain", size)
                return save, load, save / plain[0], load / plain[1], size

        found = zip(*runner.in_turns({place: turn}, rounds)[place], strict=True)
        names = ("save", "load", "save_ratio", "load_ratio", "bytes")
        rows[place] = runner.medians(dict(zip(names, found, strict=True)), 1)
    return rows


def main() -> None:
    options = runner.arguments(__doc__, tokens=3000, rounds=5)
    torch.set_num_threads(1)
    fp16 = 4 * GEOMETRY.num_layers * GEOMETRY.num_kv_heads * GEOMETRY.head_dim * options.tokens
    rows, cells = [], []
    for spec in SPECS:
        cache = filled(spec, GEOMETRY, options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            for place, row in measure(cache, options.rounds, Path(folder)).items():
                rows.append({"spec": spec, "place": place, **row})
                speeds = (f"{row['bytes'] / 1e6 / row[name]:.0f}" for name in ("save", "load"))
                copies = (f"{row[name]:.1f}" for name in ("save_ratio", "load_ratio"))
                save, load = zip(speeds, copies, strict=True)
                cells.append([f"{spec}, {place}", f"{row['bytes'] / fp16:.3f}", *save, *load])
    body = runner.table(" | size | save MB/s | x copy | load MB/s | x copy", cells)
    runner.report(options, "store", rows, body, ["tokens"], fp16=f"{fp16 / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
