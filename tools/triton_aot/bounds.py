"""What every compiled kernel has to stay within, on all devices.

Kernels that make bytes, or numbers to the bit, have no fused and no approximate operation. Where a
kernel decides how long a decode step takes, instructions and copies are bounded, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from machine_code import Facts, Launch


@dataclass(frozen=True)
class Bounds:
    """What a kernel may take.

    Parameters
    ----------
    stack : int or None
        Bytes of a thread that did not fit into registers; None for any.
    registers : int
        Of a thread.
    exact : bool
        Whether nothing may be fused or approximate.
    instructions : float or None
        Of a warp, a token.
    wide : int
        Copies of 16 bytes into shared memory, at least.
    tensor : bool
        Whether products have to be on tensor cores.
    moved : int or None
        Left operands through shared memory after they were decoded.
    """

    stack: int | None = 0
    registers: int = 255
    exact: bool = False
    instructions: float | None = None
    wide: int = 0
    tensor: bool = False
    moved: int | None = None


PLAIN = Bounds()
EXACT = Bounds(exact=True)
"""Of kernels that make bytes, or numbers to the bit."""

BOUNDS = {
    "attend_general": PLAIN,
    "check_tokens": EXACT,
    "choose_bases": EXACT,
    "decode_keys": EXACT,
    "decode_tiles": EXACT,
    "encode_groups": EXACT,
    "encode_tokens": EXACT,
    "merge_parts": PLAIN,
    "prepare_queries": PLAIN,
    "query_digits": PLAIN,
    "rotate_tokens": EXACT,
    "search_codes": EXACT,
    "store_codes": EXACT,
    "take_tokens": EXACT,
    "treat_tokens": EXACT,
}
"""By kernel, but for the fast one, whose bounds are those of its variants."""

_INSTRUCTIONS = {4: 28, 8: 28, 16: 40}
"""Of `attend_digits`, by query rows, of up to 128 channels."""
_MORE = {4: 0, 8: 4, 16: 8}
"""With zeros or shifts."""


def _digits(launch: Launch) -> Bounds:
    rows, wide = launch.constants["G"], launch.constants["V"].dim > 128
    forms = launch.constants["K"], launch.constants["V"]
    more = any(form.has(name) for form in forms for name in ("zero", "shift"))
    return Bounds(
        registers=200 if rows == 4 and not wide and not more else 255,
        instructions=(_INSTRUCTIONS[rows] + _MORE[rows] * more) * (2 if wide else 1),
        wide=8,
        tensor=True,
        moved=0,
    )


_OF_TRELLISES = {2: 29, 3: 37, 4: 48, 5: 80, 6: 134}
"""Instructions over trellises, by bits, of 4 query rows and up to 128 channels."""


def _trellises(launch: Launch) -> Bounds:
    v, rows = launch.constants["V"], launch.constants["G"]
    few = rows == 4 and v.dim <= 128
    return Bounds(
        stack=0 if rows <= 8 and v.bits < 6 and (v.dim <= 128 or v.bits != 3) else None,
        instructions=_OF_TRELLISES[v.bits] if few else None,
        wide=8,
        tensor=True,
        moved=0,
    )


def bounds_of(launch: Launch) -> Bounds:
    """Return the bounds of what a launch compiles."""
    if launch.name != "attend_digits":
        return BOUNDS[launch.name]
    return _trellises(launch) if launch.constants["K"].kind == "trellis" else _digits(launch)


def problems(found: Facts, bounds: Bounds) -> list[str]:
    """Return where a kernel is beyond its bounds."""
    wrong = []
    if bounds.stack is not None and found.stack > bounds.stack:
        wrong.append(f"{found.stack} bytes of stack")
    if found.registers > bounds.registers:
        wrong.append(f"{found.registers} registers")
    if bounds.exact and found.fused:
        wrong.append(f"{found.fused} fused or approximate")
    if bounds.instructions is not None and found.instructions > bounds.instructions:
        wrong.append(f"{found.instructions} instructions a token")
    if found.wide < bounds.wide:
        wrong.append(f"{found.wide} copies of 16 bytes")
    if bounds.tensor and not found.tensor:
        wrong.append("no tensor-core instruction")
    if bounds.moved is not None and found.moved > bounds.moved:
        wrong.append(f"{found.moved} operands through shared memory")
    return wrong
