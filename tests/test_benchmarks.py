"""The benchmarks run and print a ratio for everything that they measure."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.kernels.cpu.library import _load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_pages_against_the_contiguous_cache():
    command = [sys.executable, BENCHMARKS / "paged.py", "--tokens", "96", "--repeats", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(
        r"^(\S+), (\w+) +([\d.]+) +([\d.]+) +([\d.]+) +-?[\d.]+-[\d.]+$", printed, re.M
    )
    found = {(spec, what) for spec, what, *_ in rows}
    assert {what for _, what in found} == {"append", "attend", "gather"}
    assert len(found) == len(rows) == 3 * len({spec for spec, _ in found}) >= 15
    assert all(float(number) > 0 for row in rows for number in row[2:])


def test_many_query_rows(tmp_path):
    if isinstance(_load(), str):
        pytest.skip(f"native kernels: {_load()}")
    command = [sys.executable, BENCHMARKS / "rows.py", "--tokens", "64", "--rounds", "2"]
    command += ["--queries", "2", "40", "--threads", "1", "--ring", "0", "--out", tmp_path]
    subprocess.run([*command, "--specs", "int:bits=8"], capture_output=True, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["shape"], row["taken"]) for row in rows] == [
        (shape, taken) for shape in ("A", "B") for taken in ("few", "many")
    ] + [("MLA", "many")] * 2
    for row in rows:
        assert set(row["ms"]) == {"torch", "many"} | ({"few"} if row["shape"] != "MLA" else set())
        assert all(ms > 0 for ms in row["ms"].values())
    assert len(re.findall(r"^\| \d+ \|", (tmp_path / "rows.md").read_text(), re.M)) == 6
