"""Instructions of the native kernels, counted: figures that no other work on the machine disturbs.

    python benchmarks/instructions.py DRIVER [--out DIR]

DRIVER is the program of tests/kernels/driver.cpp (`make callgrind` builds it and runs this). Each
operation is recorded at two lengths and run once under `valgrind --tool=callgrind`; the difference
of the two counts over the difference of the lengths is what one token costs, without what a call
costs. Attention: instructions per token and KV head, all query rows of the head together. A: 32
query heads, 8 KV heads, D = 128; B: 9, 3, 64. Encoding: per vector of 128. Valgrind knows no
AVX-512, so the levels are the base one and AVX2. Written to DIR/instructions.json and .md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

from record import CHECKS, Recorder, record_attend, record_encode  # noqa: E402

SHAPES = {
    "A": {"heads": 8, "groups": 4, "dim": 128},
    "B": {"heads": 3, "groups": 3, "dim": 64},
}
ATTEND = {
    "4 bits": "turboquant:bits=4",
    "3 bits": "turboquant:bits=3",
    "2 bits": "turboquant:bits=2",
    "8 bits": "int:bits=8",
    "kivi 4": "kivi:bits=4",
    "centred 4": "turboquant:bits=4,center=64",
    "fp16": "none:dtype=fp16",
}
ENCODE = {"4 bits": "turboquant:bits=4", "8 bits": "int:bits=8", "kivi 4": "kivi:bits=4"}
LENGTHS = (1024, 2048)
COUNTS, HEADS = (128, 256), 6  # rows times heads of `encode_compare`
LEVELS = ("none", "avx2")
Row = dict[str, Any]


def record(path: Path) -> list[Row]:
    """Write two cases for each row, the short one first; return the rows."""
    rows: list[Row] = []
    recorder = Recorder()
    with recorder.recording():
        for name, spec in ATTEND.items():
            for shape, sizes in SHAPES.items():
                for held in LENGTHS:
                    record_attend(recorder, spec=spec, held=held, **sizes)
                units = (LENGTHS[1] - LENGTHS[0]) * sizes["heads"]
                rows.append({"name": f"attend, {name}, {shape}", "units": units})
        for name, spec in ENCODE.items():
            for side in "kv":
                for count in COUNTS:
                    record_encode(recorder, spec, side, 128, count, 0, torch.float32)
                units = (COUNTS[1] - COUNTS[0]) * HEADS
                rows.append({"name": f"encode, {name}, {side.upper()}", "units": units})
    assert len(recorder.cases) == 2 * len(rows)
    recorder.write(path)
    return rows


def counts(driver: Path, cases: Path, level: str, folder: Path) -> list[int]:
    """Return the instructions of each case."""
    out = folder / f"{level}.out"
    functions = [f"kvp_{operation}" for operation in CHECKS]
    marks = [f"--{when}={name}" for name in functions for when in ("zero-before", "dump-after")]
    tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", *marks]
    words = [*tool, str(driver), str(cases), "--level", level, "--repeat", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = []
    while (part := out.with_name(f"{out.name}.{len(found) + 1}")).is_file():
        found.append(int(re.search(r"^totals: (\d+)", part.read_text(), re.M)[1]))
    return found


def first_line(*command: str) -> str:
    """Return what a program tells of its version."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("driver", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "attend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases"
        rows = record(cases)
        for level in LEVELS:
            found = counts(options.driver, cases, level, Path(folder))
            assert len(found) == 2 * len(rows), (level, len(found))
            for row, short, long in zip(rows, found[::2], found[1::2], strict=True):
                row[level] = round((long - short) / row["units"], 1)
    versions = {
        "valgrind": first_line("valgrind", "--version"),
        "compiler": first_line("c++", "--version"),
    }
    lines = [
        "# Instructions",
        "",
        "Counted by `make callgrind`: attention per token and KV head, all query rows of the head",
        "together (A: 32 query heads, 8 KV heads, D = 128; B: 9, 3, 64); encoding per vector of",
        "128. What a call costs is taken off. Valgrind knows no AVX-512.",
        "",
        ", ".join(f"{name}: {version}" for name, version in versions.items()),
        "",
        "| operation | base | AVX2 |",
        "|---|---|---|",
        *(f"| {row['name']} | {row['none']:.0f} | {row['avx2']:.0f} |" for row in rows),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "instructions.md").write_text("\n".join(lines) + "\n")
    report = {"versions": versions, "lengths": LENGTHS, "counts": COUNTS, "rows": rows}
    (options.out / "instructions.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines[8:]))


if __name__ == "__main__":
    main()
