"""How long imports and the command line take before any work: fresh processes, in turns.

python benchmarks/import_time.py --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from machine import about, head

PYTHON = [sys.executable, "-c"]
CLOCK = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
IMPORTS = {
    "import torch": "import torch",
    "import kvpact": "import kvpact",
    "from kvpact import *": "from kvpact import *",
}
COMMANDS = {
    "python -c pass": [*PYTHON, "pass"],
    "kvpact --help": [sys.executable, "-m", "kvpact", "--help"],
    "kvpact eval --help": [sys.executable, "-m", "kvpact", "eval", "--help"],
    "kvpact doctor --json": [sys.executable, "-m", "kvpact", "doctor", "--json"],
}


def import_seconds(statement: str) -> float:
    """Return the seconds of an import in a fresh process, without the interpreter's start."""
    done = subprocess.run([*PYTHON, CLOCK.format(statement)], capture_output=True, check=True)
    return float(done.stdout)


def command_seconds(command: list[str]) -> float:
    """Return the seconds of a whole process."""
    begin = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - begin


def measured(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each import and command, once a round; an untimed round comes first."""
    seconds: dict[str, list[float]] = {name: [] for name in (*IMPORTS, *COMMANDS)}
    for number in range(rounds + 1):
        now = {name: import_seconds(text) for name, text in IMPORTS.items()}
        now |= {name: command_seconds(command) for name, command in COMMANDS.items()}
        if number:
            for name, value in now.items():
                seconds[name].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(head(about(python=sys.version.split()[0], rounds=options.rounds)))
    seconds = measured(options.rounds)
    print(f"\n{'seconds':24} {'median':>8} {'least':>8} {'most':>8}")
    for name, values in seconds.items():
        print(f"{name:24} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}")
    pairs = zip(seconds["from kvpact import *"], seconds["import torch"], strict=True)
    beyond = statistics.median(a - b for a, b in pairs)
    print(
        f"\nall of kvpact's names beyond torch's own import: {beyond:.3f} s, median of the rounds"
    )


if __name__ == "__main__":
    main()
