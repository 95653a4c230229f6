"""The benchmarks run and print a ratio for everything that they measure."""

import re
import subprocess
import sys
from pathlib import Path

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
