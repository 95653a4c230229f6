"""Builds of the native library beside each other: steps, chunks and packing.

    python benchmarks/libraries.py LIBRARY … [--levels avx512 avx2] [--specs SPEC …] …

The first column is the library that is installed; each LIBRARY is another build of it, such as the
one inside of an unpacked wheel. The builds take turns, each time in a process of its own on one
thread, at each instruction set. Milliseconds on the CPU for one layer of 8 KV heads and 32 query
heads of width 128: packing --tokens tokens, then a step of one token and a chunk of 64 over them.
Printed are medians, and in brackets the median of the ratios to the installed library.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import children
import runner
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.testing.data import by_name

SPECS = ["trellis:bits=4", "turboquant:bits=4", "int:bits=8", "kivi:bits=2"]
HEADS, QUERIES, DIM, LAYERS = 8, 32, 128, 3


def seconds(call: Callable[[int], object]) -> float:
    """Return the seconds on the CPU that a call takes for a layer."""
    layers = (partial(call, layer) for layer in range(LAYERS))
    return runner.turn_of(*layers, clock=time.process_time)()


def measure(specs: list[str], tokens: int) -> dict[str, float]:
    """Return the seconds of each kind of work, in this process."""
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
    return found


def main() -> None:
    if children.answer(measure):
        return
    given = {"levels": ["avx512vbmi", "avx512", "avx2"], "specs": SPECS, "libraries": [Path]}
    options = runner.arguments(__doc__, "libraries", **given, tokens=8192, rounds=5)
    builds = {"installed": {}}
    for each in options.libraries:
        builds[str(each)] = {"KVPACT_NATIVE": str(each.resolve(strict=True))}
    rows, body, work = [], [], {"specs": options.specs, "tokens": options.tokens}
    for level in options.levels:
        turns = {
            name: partial(
                children.asked, __file__, work, environment={"KVPACT_SIMD": level, **more}
            )
            for name, more in builds.items()
        }
        found = runner.in_turns(turns, options.rounds, warm=0)
        cells = []
        for what in found["installed"][0]:
            times = {name: [each[what] for each in rounds] for name, rounds in found.items()}
            part = runner.compared(times, "installed", work=what, level=level)
            for row in part:
                row["over installed"] = runner.ratios(times[row["what"]], times["installed"])[1]
            rows += part
            cells.append([what, *(f"{r['ms']:.2f} ({r['over installed']:.2f})" for r in part)])
        body += [f"KVPACT_SIMD={level}, ms:", "", runner.table(["", *builds], cells), ""]
    runner.report(options, "libraries", rows, body, ("tokens", "rounds"))


if __name__ == "__main__":
    main()
