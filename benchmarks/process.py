"""Memory that a process takes for a cache, as the kernel counts it, beside DynamicCache's.

    python benchmarks/process.py [--models smollm2 gemma3] [--dtypes float32 bfloat16]
        [--threads 1 2] [--tokens 32 128 512 1000 4000 8000] [--chunks 0 512]
        [--specs trellis:bits=4 …] [--peers] [--runs 5] [--steps 64] [--out DIR]

Each cache gets a process of its own, which loads the model, generates two tokens, and then
generates --steps tokens behind a prompt of --tokens, in one piece (0) or in chunks. *Cache* is what
its tensors take; *peak* and *after* are how much more than before the prompt was resident, at any
time and at the end (VmHWM and VmRSS of /proc/self/status, Linux). Nothing is given back to the
system before it is read. Medians of the runs, which take turns. With --peers the caches of the
leaderboard's other packages, which are installed into folders of their own, stand beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from leaderboard_contenders import contender, installed, points
from machine import about, head, save

EXACT = "DynamicCache"
SPECS = ("trellis:bits=4", "turboquant:bits=4", "int:bits=8", "none")
MIB = 1 << 20
Row = dict[str, Any]


def run(case: Row) -> dict[str, int]:
    """Measure one case in a new process, under no policy of threads but the user's.

    Returns nothing where the process ends before it has measured, as some peers' does.
    """
    script = str(Path(__file__).parent / "process_case.py")
    environment = {x: y for x, y in os.environ.items() if x != "OMP_WAIT_POLICY"}
    peer, other, _ = case["spec"].partition(": ")
    if other and (place := installed(peer, contender(peer).requires)):
        environment["PYTHONPATH"] = str(place)
        environment["PATH"] = os.pathsep.join([str(place / "bin"), environment["PATH"]])
    command = [sys.executable, script, json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(
            f"{case['spec']}: {(done.stderr.strip() or 'it was killed').splitlines()[-1]}",
            file=sys.stderr,
        )
        return {}
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def caches(options: argparse.Namespace) -> list[str]:
    """Return the caches to measure, DynamicCache first."""
    peers = [name for name in points() if name != "own"] if options.peers else []
    named = [f"{name}: {cache}" for name in peers for cache in contender(name).caches]
    return [EXACT, *options.specs, *named]


def measure(options: argparse.Namespace) -> None:
    """Measure all caches on each piece of work, which take turns; write each time."""
    rows: list[Row] = []
    axes = options.models, options.dtypes, options.threads, options.tokens, options.chunks
    for model, dtype, threads, tokens, chunk in itertools.product(*axes):
        if chunk >= tokens:
            continue
        work = {"model": model, "dtype": dtype, "threads": threads}
        work |= {"tokens": tokens, "chunk": chunk}
        found: dict[str, list[dict[str, int]]] = {spec: [] for spec in caches(options)}
        for _ in range(options.runs):
            for spec, runs in found.items():
                runs.append(run(work | {"spec": spec, "steps": options.steps}))
        for spec, runs in found.items():
            if not all(runs):
                continue  # it was said why
            middle = {name: statistics.median(x[name] for x in runs) for name in runs[0]}
            spread = {
                f"{x}_spread": sorted(y[x] for y in runs)[:: len(runs) - 1 or 1] for x in runs[0]
            }
            rows.append(work | {"spec": spec} | middle | spread)
            print(line(rows[-1]), flush=True)
        if options.out is not None:
            found = about(steps=options.steps, runs=options.runs)
            save(options.out, "process", found, rows, markdown(rows, found))


def line(row: Row) -> str:
    """Return a row of the table."""
    where = f"{row['model']} | {row['dtype']} | {row['threads']} | {row['tokens']:,}"
    sizes = " | ".join(f"{row[name] / MIB:.0f}" for name in ("cache", "peak", "after"))
    return f"| {where} | {row['chunk'] or 'one piece'} | {row['spec']} | {sizes} |"


def markdown(rows: list[Row], found: dict[str, object]) -> str:
    """Return a table."""
    columns = "| model | dtype | threads | prompt | in | cache | holds, MiB | peak | after |"
    ruler = "|---|---|--:|--:|--:|---|--:|--:|--:|"
    return "\n".join([head(found), "", columns, ruler, *map(line, rows), ""])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32, 128, 512, 1000, 4000, 8000])
    parser.add_argument("--chunks", nargs="+", type=int, default=[0, 512])
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
