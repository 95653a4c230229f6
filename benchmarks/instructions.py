"""Instructions of the native kernels, counted: figures that no other work on the machine disturbs.

    python benchmarks/instructions.py DRIVER NEON_DRIVER [--out DIR]

DRIVER is the program of tests/kernels/driver.cpp, NEON_DRIVER that for AArch64: `make callgrind`
builds them and runs this (Debian: valgrind, g++-aarch64-linux-gnu, qemu-user). Each operation is
recorded at two lengths and run once; the difference of the two counts over the difference of the
lengths is what one token costs, without what a call costs. Attention: instructions per token and KV
head, all query rows of the head together. A: 4 query heads on a KV head, D = 128; B: 3, D = 64.
Encoding: per vector of 128. The base level and AVX2 are counted by `valgrind --tool=callgrind`,
which knows no AVX-512: that level is stepped through (ptrace), on processors that have it. NEON is
counted by QEMU, without what the C library does. Written to DIR/instructions.json and .md.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import runner
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

from record import record_attend, record_encode
from recorder import CHECKS, Recorder

from kvpact.kernels.cpu import library

ROOT = Path(__file__).parents[1]
SHAPES = {"A": {"groups": 4, "dim": 128}, "B": {"groups": 3, "dim": 64}}
ATTEND = {
    "4 bits": "turboquant:bits=4",
    "3 bits": "turboquant:bits=3",
    "2 bits": "turboquant:bits=2",
    "8 bits": "int:bits=8",
    "trellis 4": "trellis:bits=4",
    "kivi 4": "kivi:bits=4",
    "kvarn 4": "kvarn:bits=4",
    "centred 4": "turboquant:bits=4,center=64",
    "fp16": "none:dtype=fp16",
}
ENCODE = {name: ATTEND[name] for name in ("4 bits", "8 bits", "kivi 4")}
LENGTHS = (256, 512)
COUNTS, HEADS = (32, 64), 6  # rows times heads of `encode_compare`
LEVELS = {"none": "base", "neon": "NEON", "avx2": "AVX2", "avx512": "AVX-512"}


def record(path: Path) -> list[runner.Row]:
    """Write two cases for each row, the short one first; return the rows.

    A case before them takes on itself what only the first call of a process costs.
    """
    rows: list[runner.Row] = []
    recorder = Recorder()
    with recorder.recording():
        record_attend(recorder, spec=ATTEND["4 bits"])
        for (name, spec), shape in itertools.product(ATTEND.items(), SHAPES):
            for held in LENGTHS:
                record_attend(recorder, spec=spec, held=held, heads=1, **SHAPES[shape])
            rows.append({"name": f"attend, {name}, {shape}", "units": LENGTHS[1] - LENGTHS[0]})
        for (name, spec), side in itertools.product(ENCODE.items(), "kv"):
            for count in COUNTS:
                record_encode(recorder, spec, side, 128, count, 0, torch.float32)
            units = (COUNTS[1] - COUNTS[0]) * HEADS
            rows.append({"name": f"encode, {name}, {side.upper()}", "units": units})
    assert len(recorder.cases) == 1 + 2 * len(rows)
    recorder.write(path)
    return rows


def profiled(driver: Path, cases: Path, level: str, folder: Path) -> list[int]:
    """Return the instructions of each case, by valgrind."""
    found: list[int] = []
    # In a run for each operation: callgrind mixes up marks of functions whose names begin alike.
    for operation in CHECKS:
        out = folder / f"{level}.{operation}"
        marks = [f"--{when}=kvp_{operation}" for when in ("zero-before", "dump-after")]
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", *marks]
        told(*tool, str(driver), str(cases), "--level", level, "--run", "once")
        for part in itertools.count(1):
            file = out.with_name(f"{out.name}.{part}")
            if not file.is_file():
                break
            found.append(int(re.search(r"^totals: (\d+)", file.read_text(), re.M)[1]))
    return found


def stepped(driver: Path, cases: Path, level: str) -> list[int]:
    """Return the instructions of each case, by stepping; nothing without such a processor."""
    words = str(driver), str(cases), "--level", level, "--run", "steps"
    return [*map(int, told(*words).split())] if level in library().levels else []


def emulated(driver: Path, cases: Path, count: int) -> list[int]:
    """Return the instructions of each case between the first and the last function of NEON."""
    symbols = told("aarch64-linux-gnu-nm", "--demangle", "--print-size", str(driver))
    # Address and size of functions; those of an object file stand together.
    found = re.findall(r"^(\w{16}) (\w{16}) [tTwW] kvp_neon::", symbols, re.M)
    places = [(int(address, 16), int(address, 16) + int(size, 16)) for address, size in found]
    begin, end = min(places)[0], max(last for _, last in places)
    command = ["qemu-aarch64", "-singlestep", "-d", "exec,nochain", "-dfilter"]
    command += [f"{begin:#x}..{end - 1:#x}", str(driver)]
    counts = []
    for case in range(count):
        words = [*command, str(cases), "--level", "neon", "--run", "once", "--case", str(case)]
        # A line of the log is an instruction.
        log = subprocess.run(words, stderr=subprocess.PIPE, check=True).stderr
        counts.append(log.count(b"\n"))
    return counts


def told(*command: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def main() -> None:
    drivers, out = ("driver", "neon_driver"), ROOT / "benchmarks" / "results" / "attend"
    options = runner.arguments(__doc__, *drivers, **dict.fromkeys(drivers, Path), out=out)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases"
        rows = record(cases)
        for level in LEVELS:
            if level == "neon":
                found = emulated(options.neon_driver, cases, 1 + 2 * len(rows))
            elif level == "avx512":
                found = stepped(options.driver, cases, level)
            else:
                found = profiled(options.driver, cases, level, Path(folder))
            assert len(found) in (0, 1 + 2 * len(rows)), (level, len(found))
            for row, short, long in zip(rows, found[1::2], found[2::2], strict=False):
                row[level] = round((long - short) / row["units"], 1)
    versions = {
        "valgrind": told("valgrind", "--version").strip(),
        "QEMU": told("qemu-aarch64", "--version").splitlines()[0].split(" version ")[1],
        "compiler": told("c++", "--version").splitlines()[0],
    }
    cells = [
        [row["name"], *(f"{row[level]:.0f}" if level in row else "–" for level in LEVELS)]
        for row in rows
    ]
    said = """Counted by `make callgrind`: attention per token and KV head, all query rows of the
head together (A: 4 query heads on a KV head, D = 128; B: 3, D = 64); encoding per vector of
128. What a call costs is taken off. Valgrind knows no AVX-512: that level is stepped
through, and NEON is counted by QEMU. `fast` is the exact kernel where there is no
AVX-512."""
    found = {"versions": versions, "lengths": LENGTHS, "counts": COUNTS, "rows": rows}
    body = [said, "", runner.table(["operation", *LEVELS.values()], cells)]
    runner.report(options, "instructions", found, body, title="Instructions", **versions)


if __name__ == "__main__":
    main()
