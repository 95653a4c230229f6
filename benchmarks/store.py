"""Saving and loading against a plain copy of the same bytes: snapshots, and prefixes in stores.

    python benchmarks/store.py [--tokens 3000] [--layers 30] [--heads 3] [--dim 64] [--repeats 5]

One sequence of a model's shape (SmolLM2-135M's if nothing is said), random K and V. *memory* and
*directory* are prefix caches on a `MemoryStore` and a `DirectoryStore`, *file* is a snapshot. The
plain copy moves as many bytes: in memory, or to a file and back, with the same `fsync`. Both take
turns; medians are reported. *size* is all bytes stored over those of an fp16 cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvpact import CacheGeometry, ContiguousCache, PrefixCache, Snapshot, create_cache
from kvpact.stores import DirectoryStore, MemoryStore, Store

SPECS = ("none", "int:bits=8", "turboquant:bits=4", "kivi:bits=2")


def filled(spec: str, geometry: CacheGeometry, tokens: int) -> ContiguousCache:
    """Return a cache that holds random tokens."""
    cache = create_cache(spec, geometry)
    assert isinstance(cache, ContiguousCache)
    generator = torch.Generator().manual_seed(0)
    shape = (1, geometry.num_kv_heads, tokens, geometry.head_dim)
    for layer in range(geometry.num_layers):
        k, v = torch.randn(2, *shape, generator=generator)
        cache.store(layer, k=k, v=v)
    return cache


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Return seconds and the result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def plain_write(path: Path, data: bytes) -> None:
    """Write a file and sync it."""
    with open(path, "wb") as file:
        file.write(data)
        os.fsync(file.fileno())


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
    save, _ = timed(lambda: cache.snapshot().save(path))
    empty = create_cache(cache.specs[0], cache.geometry)
    load, _ = timed(lambda: empty.restore(Snapshot.load(path)))
    assert empty.seq_len(0) == cache.seq_len(0), "nothing was loaded"
    return save, load, path.stat().st_size


def copy_times(path: Path | None, size: int) -> tuple[float, float]:
    """Copy as many bytes: in memory, or to a file and back; return seconds of both ways."""
    data = os.urandom(1 << 20) * (size >> 20) + bytes(size & 0xFFFFF)
    if path is None:
        return timed(lambda: bytes(bytearray(data)))[0] / 2, timed(lambda: bytearray(data))[0]
    save, _ = timed(lambda: plain_write(path, data))
    load, read = timed(path.read_bytes)
    assert len(read) == size
    return save, load


def measure(cache: ContiguousCache, repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return, by place, bytes, seconds to save and load, and their ratios to a plain copy's."""
    tokens = cache.seq_len(0)
    ids, rows = list(range(tokens)), {}
    for place in ("memory", "directory", "file"):
        runs = []
        for index in range(repeats + 1):
            path = folder / f"{place}-{index}"
            if place == "file":
                save, load, size = file_times(path, cache)
            else:
                with MemoryStore() if place == "memory" else DirectoryStore(path) as store:
                    save, load, size = store_times(store, cache, ids)
            plain = copy_times(None if place == "memory" else folder / "plain", size)
            runs.append((save, load, save / plain[0], load / plain[1], size))
        middle = [statistics.median(column) for column in zip(*runs[1:], strict=True)]
        rows[place] = dict(
            zip(("save", "load", "save_ratio", "load_ratio", "bytes"), middle, strict=True)
        )
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 3000), ("layers", 30), ("heads", 3), ("dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    geometry = CacheGeometry(options.layers, options.heads, options.dim, dtype=torch.float32)
    fp16 = 4 * options.layers * options.heads * options.dim * options.tokens
    print(f"{options.tokens} tokens, {fp16 / 1e6:.1f} MB in fp16, torch {torch.__version__}")
    print(f"{'':30}{'size':>7}{'save MB/s':>11}{'x copy':>8}{'load MB/s':>11}{'x copy':>8}")
    for spec in SPECS:
        cache = filled(spec, geometry, options.tokens)
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(cache, options.repeats, Path(folder))
        for place, row in rows.items():
            save, load = (row["bytes"] / 1e6 / row[name] for name in ("save", "load"))
            print(
                f"{spec + ', ' + place:30}{row['bytes'] / fp16:7.3f}{save:11.0f}"
                f"{row['save_ratio']:8.1f}{load:11.0f}{row['load_ratio']:8.1f}"
            )


if __name__ == "__main__":
    main()
