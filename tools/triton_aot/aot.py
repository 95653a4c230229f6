"""Compiles kernels ahead of time, says what they take: ``python tools/triton_aot/aot.py``.

No device is needed. Kernels have to stay within their bounds (`bounds.py`). With ``--check FILE``
the facts about them have to be those of a table, if it was made with the same Triton, as far as it
has them; ``--write FILE`` writes what was compiled into such a table, and leaves the rest of it.
Triton keeps what it has compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from bounds import Bounds, bounds_of, problems
from machine_code import Facts, Launch, compiled, facts
from scenes import all_launches

CAPABILITIES = (80, 89, 90, 100)
LOOP = "attend_digits"
"""The kernel whose instructions a token are counted."""
QUICK = (
    "encode 64 V turboquant:bits=4: encode_tokens",
    "encode 1 K turboquant:bits=4: check_tokens",
    "encode 64 K turboquant:bits=3,center=64: rotate_tokens",
    "encode 64 K turboquant:bits=3,center=64: encode_groups",
    "encode 64 K trellis:bits=4: choose_bases",
    "encode 64 K trellis:bits=4: treat_tokens",
    "encode 64 K trellis:bits=4: store_codes",
    "encode 64 V trellis:bits=3: search_codes",
    "decode K turboquant:bits=4: decode_tiles",
    "decode K trellis:bits=4: decode_keys",
    "turboquant:bits=2 D=128 4x1: attend_digits",
    "turboquant:bits=2 D=128 4x1: query_digits",
    "turboquant:bits=2 D=128 4x1: prepare_queries",
    "turboquant:bits=2 D=128 4x1: merge_parts",
    "turboquant:bits=3 D=128 4x1: attend_digits",
    "turboquant:bits=4 D=128 4x1: attend_digits",
    "turboquant:bits=4 D=128 4x1: attend_general",
    "int:bits=4 D=128 4x1: attend_digits",
    "trellis:bits=4 D=128 4x1: attend_digits",
    "take 1 turboquant:bits=4: take_tokens",
)
"""What the tests compile each time: every kernel once."""


_launches: dict[str, Launch] = {}
"""By their names in the table; processes that compile have them from the one that began them."""


def facts_of(name: str, capability: int) -> Facts:
    """Compile one of `_launches`, and return what is known of it."""
    launch = _launches[name]
    made = compiled(launch, capability)
    if launch.name != LOOP:
        return facts(made)
    return facts(made, launch.constants["NT"] * 32, 2 * launch.constants["G"])


def chosen(kernels: list[str] | None, quick: bool) -> dict[str, Launch]:
    """Return launches by their names in the table.

    Parameters
    ----------
    kernels : list of str or None
        Of these kernels; None for all.
    quick : bool
        Only `QUICK`.
    """
    return {
        name: launch
        for name, launch in all_launches()
        if (not quick or name in QUICK) and (not kernels or launch.name in kernels)
    }


def table(launches: dict[str, Launch], capability: int, jobs: int) -> Iterator[tuple[str, Facts]]:
    """Compile launches in so many processes; in their order."""
    _launches.update(launches)
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        names = list(launches)
        yield from zip(names, pool.map(facts_of, names, itertools.repeat(capability)), strict=True)


def read(path: Path) -> dict[str, Any]:
    """Return a table: of each device, what each kernel takes. Empty if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, known: dict[str, Any]) -> None:
    """Write a table, a line for each kernel."""
    parts = [f'"triton": {json.dumps(known["triton"])}']
    for place in sorted(known.keys() - {"triton"}, key=lambda place: int(place[3:])):
        lines = [f"  {json.dumps(name)}: {json.dumps(of)}" for name, of in known[place].items()]
        parts.append(f'"{place}": {{\n' + ",\n".join(lines) + "\n }")
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def merged(
    known: dict[str, Any], place: str, lines: dict[str, Any], kernels: list[str] | None
) -> None:
    """Put the lines of kernels in the place of those that a table has of them."""

    def kept(name: str) -> bool:
        return bool(kernels) and name.split(": ")[1].split()[0] not in (kernels or ())

    rest = {name: of for name, of in known.get(place, {}).items() if kept(name)}
    known[place] = dict(sorted((rest | lines).items()))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--kernels", nargs="+", help="these alone")
    parser.add_argument("--quick", action="store_true", help="a variant of each kernel")
    parser.add_argument("--list", action="store_true", help="names alone; nothing is compiled")
    parser.add_argument("--check", type=Path, help="the table to compare with")
    parser.add_argument("--write", type=Path, help="the table to write; not with --quick")
    parser.add_argument("--jobs", type=int, default=2, help="kernels that are compiled at a time")
    options = parser.parse_args(arguments)
    if options.write and options.quick:
        parser.error("--write needs all variants of a kernel: not with --quick")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, check or write; returns the exit status."""
    options = parsed(arguments)
    launches = chosen(options.kernels, options.quick)
    if options.list:
        print(*launches, sep="\n")
        return 0
    known = read(options.check or options.write) if options.check or options.write else {}
    same = known.get("triton", triton.__version__) == triton.__version__
    if options.write and not same and options.kernels:
        print(f"the table is of triton {known['triton']}: write all kernels")
        return 1
    bad = 0
    for capability in options.capability:
        place = f"sm_{capability}"
        lines = {}
        for name, found in table(launches, capability, options.jobs):
            launch, line = launches[name], found.to_json()
            bounds = bounds_of(launch)
            # What other versions of Triton take is theirs; what is exact is not.
            wrong = problems(found, bounds if same else Bounds(stack=None, exact=bounds.exact))
            lines[name] = line
            expected = known.get(place, {}).get(name)
            if options.check and same and line != (expected or line):
                wrong.append(f"the table has {expected}")
            bad += bool(wrong)
            print(place, name, json.dumps(line), *wrong, flush=True)
        if options.write:
            known["triton"] = triton.__version__
            merged(known, place, lines, options.kernels)
            write(options.write, known)
    if options.check and not same:
        print(f"the table is of triton {known['triton']}, this is {triton.__version__}")
        print("so facts were not compared, and bounds are none but those of what is exact")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
