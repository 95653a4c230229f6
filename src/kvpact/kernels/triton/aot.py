"""Compiles kernels ahead of time, says what they take: ``python -m kvpact.kernels.triton.aot``.

No device is needed. With ``--check FILE`` the facts are compared with a table, and with the bounds
that decoding has to stay within; with ``--write FILE`` they become the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from kvpact.kernels.triton.digits import attend_digits
from kvpact.kernels.triton.forms import power_of_two, slots_of
from kvpact.kernels.triton.machine_code import Facts, compiled, facts
from kvpact.kernels.triton.operands import key_width
from kvpact.kernels.triton.query_digits import query_digits
from kvpact.kernels.triton.tuning import choice, side_by_side
from kvpact.spec import parse_spec

CAPABILITIES = (80, 89, 90, 100)
WIDTHS = (64, 128, 256)
BITS = (2, 3, 4)
QUICK = (
    "turboquant:bits=4 D128 R4",
    "turboquant:bits=3 D128 R4",
    "turboquant:bits=2 D128 R4",
    "turboquant:bits=4 D128 R16",
    "turboquant:bits=4/turboquant:bits=2 D128 R4",
    "int:bits=8 D128 R4",
    "int:bits=4 D128 R4",
    "queries D128 R4",
)
"""What the tests compile each time."""


class Variant(NamedTuple):
    """A kernel for slots of K and V.

    Parameters
    ----------
    spec : str
        Of the slots.
    dim, rows : int
        Their width, and the rows of queries, filled up.
    inside, capped : bool
        See `attend_digits`.
    """

    spec: str
    dim: int
    rows: int
    inside: bool = True
    capped: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        flags = ("" if self.inside else " pages of a tile") + (" softcap" if self.capped else "")
        return f"{self.spec} D{self.dim} R{self.rows}{flags}"


def variants() -> Iterator[Variant]:
    """Iterate over what dispatch may choose, at the widths and counts of rows that models have."""
    for k, v in itertools.product(BITS, BITS):
        spec = f"turboquant:bits={k}" + ("" if k == v else f"/turboquant:bits={v}")
        for rows in (4, 8, 16) if k == v else (4, 8):
            yield Variant(spec, 128, rows)
        if k == v:
            yield from (Variant(spec, dim, 4) for dim in WIDTHS if dim != 128)
            yield Variant(spec, 128, 4, inside=False)
            yield Variant(spec, 128, 4, capped=True)
    for bits in (8, 4):
        for group, rows in itertools.product((32, 128), (4, 8)):
            yield Variant(f"int:bits={bits}" + f",group={group}" * (group != 32), 128, rows)
        yield Variant(f"int:bits={bits}", 64, 4)
        yield Variant(f"int:bits={bits}", 256, 4)
    yield Variant("int:bits=8/int:bits=4", 128, 4)


def facts_of(variant: Variant, capability: int) -> Facts:
    """Compile a variant of `attend_digits`."""
    spec, cpu = parse_spec(variant.spec), torch.device("cpu")
    k = slots_of(spec.key.key_codec(variant.dim, torch.float16), False, cpu).form
    v = slots_of(spec.value.value_codec(variant.dim, torch.float16), True, cpu).form
    assert k is not None and v is not None
    chosen = choice(v.bits, variant.rows, variant.inside)
    pointers = {"ROWS": "*i64", "DIGITS": "*i8", "K_TABLE": "*i32", "V_TABLE": "*i32"}
    pointers |= dict.fromkeys(("UNITS", "PACKED", "LSE"), "*fp32")
    constants = {"K": k, "V": v, "G": variant.rows, "NT": chosen.tiles, "INSIDE": variant.inside}
    constants |= {"CAPPED": variant.capped, "KW": side_by_side(), "ASM": True}
    made = compiled(
        attend_digits,
        pointers,
        constants,
        capability,
        {"worth": "fp32", "cap": "fp32"},
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        maxnreg=chosen.registers,
        enable_fp_fusion=True,
    )
    return facts(made, chosen.tiles * 32, 2 * variant.rows)


def query_facts(dim: int, rows: int, capability: int) -> Facts:
    """Compile `query_digits` for slots of 4 bits."""
    codec = parse_spec("turboquant:bits=4").key.key_codec(dim, torch.float16)
    form = slots_of(codec, False, torch.device("cpu")).form
    assert form is not None
    size: int = key_width(form)
    pointers = {"Q": "*bf16", "SIGNS": "*fp32", "PLACES": "*i32", "DIGITS": "*i8", "UNITS": "*fp32"}
    constants = {"DIM": dim, "WIDTH": power_of_two(dim), "G": rows, "SIZE": size, "SPAN": size}
    made = compiled(
        query_digits, pointers, constants | {"ROTATED": True}, capability, {"worth": "fp32"},
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return facts(made)


def table(capability: int, quick: bool = False) -> Iterator[tuple[str, Facts]]:
    """Compile everything, or what `QUICK` names, one after the other."""
    for variant in variants():
        if not quick or variant.name in QUICK:
            yield variant.name, facts_of(variant, capability)
    for dim, rows in ((64, 4), (128, 4), (128, 16), (256, 4)):
        name = f"queries D{dim} R{rows}"
        if not quick or name in QUICK:
            yield name, query_facts(dim, rows, capability)


def problems(name: str, found: Facts, capability: int) -> list[str]:
    """Return where a kernel is beyond the bounds that were set for it."""
    wrong = []
    if found.stack > (16 if capability == 80 else 0):
        wrong.append(f"{found.stack} bytes of stack")
    if name.startswith("queries"):
        return wrong
    rows = int(name.split(" R")[1].split()[0])
    if found.registers > (200 if rows == 4 and "D256" not in name else 255):
        wrong.append(f"{found.registers} registers")
    if found.instructions > {4: 28, 8: 28, 16: 40}[rows] * (2 if "D256" in name else 1):
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
        for name, found in table(capability, options.quick):
            lines[name] = found.to_json()
            wrong = problems(name, found, capability)
            expected = known.get(place, {}).get(name)
            if same and expected != lines[name]:
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
