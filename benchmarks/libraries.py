"""Builds of the native library beside each other: steps, chunks and packing.

    python benchmarks/libraries.py LIBRARY … [--levels avx512 avx2] [--specs SPEC …] [--tokens 8192]
        [--rounds 5]

The first column is the library that is installed; each LIBRARY is another build of it, such as the
one inside of an unpacked wheel. The builds take turns, each time in a process of its own on one
thread, at each instruction set. Milliseconds on the CPU for one layer of 8 KV heads and 32 query
heads of width 128: packing --tokens tokens, then a step of one token and a chunk of 64 over them.
Printed are medians, and in brackets the median of the ratios to the installed library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.testing.data import by_name

SPECS = ("trellis:bits=4", "turboquant:bits=4", "int:bits=8", "kivi:bits=2")
HEADS, QUERIES, DIM, LAYERS = 8, 32, 128, 3


def seconds(call: Callable[[int], object]) -> float:
    """Return the seconds on the CPU that a call takes for a layer."""
    start = time.process_time()
    for layer in range(LAYERS):
        call(layer)
    return (time.process_time() - start) / LAYERS


def measure(specs: list[str], tokens: int) -> dict[str, float]:
    """Return the milliseconds of each kind of work, in this process."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, HEADS, tokens, DIM, generator=draw)
    q = torch.randn(1, QUERIES, 64, DIM, generator=draw)
    found = {}
    for spec in specs:
        geometry = CacheGeometry(LAYERS, HEADS, DIM, dtype=torch.float32)
        cache = create_cache(spec, geometry, backend="cpu")

        def attend(layer: int, new: int, cache=cache) -> object:
            given = (x[:, :, :new] for x in (k, v, q))
            return cache.attend(layer, **by_name(*given), config=AttendConfig())

        found[f"{spec}, packing"] = seconds(lambda layer, cache=cache: cache.store(layer, k=k, v=v))
        for what, new, rounds in (("step", 1, 12), ("chunk of 64", 64, 3)):
            times = [seconds(lambda layer, new=new: attend(layer, new)) for _ in range(rounds)]
            found[f"{spec}, {what}"] = median(times)
    return {name: 1e3 * value for name, value in found.items()}


def in_process(library: Path | None, level: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one library at one instruction set in a process of its own."""
    environment = {**os.environ, "KVPACT_SIMD": level}
    if library:
        environment["KVPACT_NATIVE"] = str(library.resolve(strict=True))
    words = ["--specs", *options.specs, "--tokens", str(options.tokens)]
    command = [sys.executable, __file__, "--measure", *words]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="*", type=Path, metavar="LIBRARY")
    parser.add_argument("--levels", nargs="+", default=["avx512vbmi", "avx512", "avx2"])
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.specs, options.tokens)))
        return
    libraries = [None, *options.libraries]
    for level in options.levels:
        rounds = [
            [in_process(each, level, options) for each in libraries] for _ in range(options.rounds)
        ]
        print(f"\nKVPACT_SIMD={level}, ms: installed; {'; '.join(map(str, options.libraries))}")
        for name in rounds[0][0]:
            cells = [
                f"{median(r[i][name] for r in rounds):8.2f}"
                f" ({median(r[i][name] / r[0][name] for r in rounds):.2f})"
                for i in range(len(libraries))
            ]
            print(f"{name:32}{'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
