"""Compiles kernels ahead of time, says what they take: ``python -m kvpact.kernels.triton.aot``.

No device is needed. With ``--check FILE`` kernels have to stay within bounds, and the facts about
those of `HELD` have to be those of a table, made with the same Triton; ``--write FILE`` writes such
a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from kvpact.kernels.triton.machine_code import Facts, Launch, compiled, facts
from kvpact.kernels.triton.variants import all_launches

CAPABILITIES = (80, 89, 90, 100)
EXACT = (
    "balance_tiles",
    "check_tokens",
    "choose_bases",
    "decode_keys",
    "decode_tiles",
    "encode_groups",
    "encode_tokens",
    "rotate_tokens",
    "search_codes",
    "store_codes",
    "treat_tokens",
)
"""Kernels that make bytes, or numbers to the bit."""
HELD = ("attend_digits", "query_digits")
"""Kernels whose every instruction counts: the table says what they take."""
QUICK = (
    "turboquant:bits=4 D=128 4x1",
    "turboquant:bits=3 D=128 4x1",
    "turboquant:bits=2 D=128 4x1",
    "turboquant:bits=4/turboquant:bits=2 D=128 4x1",
    "turboquant:bits=4 D=128 16x1",
    "int:bits=8 D=128 4x1",
    "int:bits=4 D=128 4x1",
    "encode 64 K turboquant:bits=4",
    "encode 1 V turboquant:bits=4",
)
"""What the tests compile each time."""


def facts_of(launch: Launch, capability: int) -> Facts:
    """Compile what a launch needs, and return what is known of it."""
    made = compiled(launch, capability)
    if launch.name not in ("attend_digits", "attend_trellises"):
        return facts(made)
    return facts(made, launch.constants["NT"] * 32, 2 * launch.constants["G"])


def table(
    capability: int, quick: bool = False, held: bool = False
) -> Iterator[tuple[str, Launch, Facts]]:
    """Compile everything one after the other, each variant once, by its first scene's name.

    Parameters
    ----------
    capability : int
        80, 89, 90 or 100.
    quick, held : bool
        Only what `QUICK`, or `HELD`, names.
    """
    wanted: dict[str, tuple[str, Launch]] = {}
    chosen: dict[str, bool] = {}
    for scene, launches in all_launches():
        for launch in launches:
            key = repr(launch)
            wanted.setdefault(key, (f"{scene}: {launch.name}", launch))
            chosen[key] = chosen.get(key, False) or not quick or scene in QUICK
    for key, (name, launch) in wanted.items():
        if chosen[key] and (not held or launch.name in HELD):
            yield name, launch, facts_of(launch, capability)


def problems(launch: Launch, found: Facts, capability: int) -> list[str]:
    """Return where a kernel is beyond the bounds that were set for it."""
    wrong = []
    if launch.name in EXACT and found.fused:
        wrong.append(f"{found.fused} fused or approximate")
    if launch.name not in ("attend_digits", "attend_trellises"):
        return wrong
    if found.stack > (16 if capability == 80 else 0):
        wrong.append(f"{found.stack} bytes of stack")
    if launch.name == "attend_trellises":
        return wrong
    rows, wide = launch.constants["G"], launch.constants["V"].dim > 128
    if found.registers > (200 if rows == 4 and not wide else 255):
        wrong.append(f"{found.registers} registers")
    if found.instructions > {4: 28, 8: 28, 16: 40}[rows] * (2 if wide else 1):
        wrong.append(f"{found.instructions} instructions a token")
    if found.wide < 8:
        wrong.append(f"{found.wide} copies of 16 bytes")
    if not found.tensor:
        wrong.append("no tensor-core instruction")
    if found.moved:
        wrong.append(f"{found.moved} operands through shared memory")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, check or write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--quick", action="store_true", help="a few variants alone")
    parser.add_argument("--check", type=Path, help="the table to compare with")
    parser.add_argument("--write", type=Path, help="the table to write")
    options = parser.parse_args(arguments)
    known = json.loads(options.check.read_text()) if options.check else {}
    same = known.get("triton") == triton.__version__
    made: dict[str, Any] = {"triton": triton.__version__}
    bad = 0
    for capability in options.capability:
        place = f"sm_{capability}"
        lines = made[place] = {}
        for name, launch, found in table(capability, options.quick, options.write is not None):
            lines[name] = found.to_json()
            wrong = problems(launch, found, capability)
            expected = known.get(place, {}).get(name)
            if same and launch.name in HELD and expected != lines[name]:
                wrong.append(f"the table has {expected}")
            bad += bool(wrong)
            print(place, name, json.dumps(lines[name]), *wrong, flush=True)
    if options.check and not same:
        print(f"the table is of triton {known.get('triton')}, this is {triton.__version__}: bounds")
    if options.write:
        options.write.write_text(json.dumps(made, indent=1) + "\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
