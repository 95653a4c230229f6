"""How long imports and the command line take before any work: fresh processes, in turns.

python benchmarks/import_time.py --rounds 9
"""

import sys
from functools import partial

import runner
from children import fresh

CLOCK = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
IMPORTS = {
    "import torch": "import torch",
    "import kvpact": "import kvpact",
    "from kvpact import *": "from kvpact import *",
}
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "kvpact --help": ["-m", "kvpact", "--help"],
    "kvpact eval --help": ["-m", "kvpact", "eval", "--help"],
    "kvpact doctor --json": ["-m", "kvpact", "doctor", "--json"],
}


def main() -> None:
    options = runner.arguments(__doc__, rounds=9)
    # Without the interpreter's start, which is in a command's time.
    turns = {n: lambda x=x: float(fresh("-c", CLOCK.format(x))) for n, x in IMPORTS.items()}
    turns |= {name: runner.turn_of(partial(fresh, *words)) for name, words in COMMANDS.items()}
    seconds = runner.in_turns(turns, options.rounds)
    rows = [
        {"what": name, "median": runner.quartiles(x)[1], "least": min(x), "most": max(x)}
        for name, x in seconds.items()
    ]
    pairs = zip(seconds["from kvpact import *"], seconds["import torch"], strict=True)
    beyond = runner.quartiles([a - b for a, b in pairs])[1]
    cells = [[x if isinstance(x, str) else f"{x:.3f}" for x in row.values()] for row in rows]
    said = f"all of kvpact's names beyond torch's own import: {beyond:.3f} s, median of the rounds"
    body = [runner.table("seconds | median | least | most", cells), "", said]
    told = {"python": sys.version.split()[0]}
    runner.report(options, "import_time", rows, body, ("rounds",), **told)


if __name__ == "__main__":
    main()
