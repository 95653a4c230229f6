"""One description of a stream of known pieces: its fields and what kernels are told follow from it.

A vector is what its codes stand for (`Levels`), changed by each of its `sides` in their order, and
transformed back. With `kivi`, for one, `x ~ code * scale + zero`, where K's scale and zero are of a
channel and 32 tokens, V's of a token and 32 channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch

from kvpact.errors import RegistrationError
from kvpact.formats.base import Field, Order
from kvpact.formats.encoding import Encoding
from kvpact.formats.fields import CodesField, GroupField, TokenField
from kvpact.formats.packed import PackedFormat
from kvpact.units import TILE

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CODEBOOK_RULES = ("ls", "l2", "unbiased")

# A side as rules and kernels see it: name, what is done, whether it belongs to a token.
_SCALE, _ZERO, _BALANCE = ("scale", "mul", True), ("zero", "add", True), ("balance", "mul", True)
_GROUP_SCALE, _GROUP_ZERO = ("scale", "mul", False), ("zero", "add", False)
_GROUP_MEAN, _GROUP_BALANCE = ("mean", "add", False), ("balance", "mul", False)

RULES_OF: dict[str, dict[str, tuple[tuple[tuple[str, str, bool], ...], ...]]] = {
    "cast": {"raw": ((),)},
    "absmax": {"grid": ((_SCALE,),), "float": ((), (_SCALE,))},
    "minmax": {"grid": ((_SCALE, _ZERO), (_GROUP_SCALE, _GROUP_ZERO))},
    "balance": {"grid": ((_GROUP_SCALE, _GROUP_ZERO, _BALANCE), (_SCALE, _ZERO, _GROUP_BALANCE))},
    **{rule: {"book": ((_SCALE,), (_SCALE, _GROUP_MEAN))} for rule in CODEBOOK_RULES},
}
"""The rules of kvpact: for each kind of levels, which sides they choose, in which order."""

_TOKEN_ORDERS = ((), ("mul t",), ("mul t", "add t"))
_ORDERS = {
    "token": (*_TOKEN_ORDERS, ("mul g", "add g"), ("mul g", "add g", "mul t"), ("mul t", "add g")),
    "channel": (*_TOKEN_ORDERS, ("mul t", "add t", "mul g")),
}
"""Sides in an order that kernels know: of a token, or of a group of tokens."""


def _require(good: bool, what: str, wanted: str) -> None:
    if not good:
        raise RegistrationError(f"{what} should be {wanted}; see kvpact.formats.form")


@dataclass(frozen=True)
class Levels:
    """What a code stands for.

    Parameters
    ----------
    kind : {"grid", "book", "float", "raw"}
        The code less `zero_code`; `values` times `unit`, by code; an 8-bit floating-point number;
        no code, but the number itself.
    bits : int
        Width of a code.
    values : tuple of float
        Of a book: `2**bits`, ascending, symmetric and without 0. Kernels multiply whole numbers
        from -128 to 127 exactly, in integers.
    unit : float
        What a value of 1 is worth.
    zero_code : int
        Of a grid.
    number : str
        ``e4m3`` or ``e5m2`` of floats; ``fp16``, ``bf16`` or ``fp32`` of raw numbers.
    """

    kind: Literal["grid", "book", "float", "raw"]
    bits: int
    values: tuple[float, ...] = ()
    unit: float = 1.0
    zero_code: int = 0
    number: str = ""

    def check(self) -> None:
        """Raise `RegistrationError` unless there are such levels."""
        kind, bits, values = self.kind, self.bits, self.values
        _require(
            kind in ("grid", "book", "float", "raw"), f"levels of kind {kind!r}", "one of four"
        )
        if kind == "grid":
            _require(2 <= bits <= 8, f"a grid of {bits} bits", "of 2 to 8")
            _require(0 <= self.zero_code < 1 << bits, f"zero_code={self.zero_code}", "a code")
        elif kind == "book":
            _require(1 <= bits <= 8 and len(values) == 1 << bits, "the values of a book", "2**bits")
            rising = all(a < b for a, b in pairwise(values))
            even = all(a == -b != 0 for a, b in zip(values, reversed(values), strict=True))
            _require(rising and even, "a book", "ascending, symmetric and without 0")
        elif kind == "float":
            good = self.number in ("e4m3", "e5m2") and bits == 8
            _require(good, f"floats {self.number!r} of {bits} bits", "e4m3 or e5m2, of 8")
        else:
            dtype = DTYPES.get(self.number)
            good = dtype is not None and bits == 8 * dtype.itemsize
            _require(good, f"raw numbers {self.number!r} of {bits} bits", "fp16, bf16 or fp32")


@dataclass(frozen=True)
class Side:
    """Numbers beside the codes (fp16), and what is done with them.

    Parameters
    ----------
    name : str
        Of the field.
    op : {"mul", "add"}
        What is done with the vector so far.
    channels : int
        Channels that share a number of one token; 0 for all.
    tokens : int
        1; or tokens of a group that share a number per channel.
    """

    name: str
    op: Literal["mul", "add"]
    channels: int = 0
    tokens: int = 1

    def check(self) -> None:
        """Raise `RegistrationError` unless there is such a side."""
        what = f"side {self.name!r}"
        _require(self.op in ("mul", "add"), f"{what}: op={self.op!r}", "'mul' or 'add'")
        grouped = self.tokens > 1 and self.tokens % TILE == 0 and not self.channels
        good = self.channels >= 0 and (self.tokens == 1 or grouped)
        _require(good, what, f"of channels of one token, or of a multiple of {TILE} tokens")


@dataclass(frozen=True)
class Form:
    """One stream.

    Parameters
    ----------
    dim : int
        Channels of a vector.
    order : {"token", "channel"}
        How codes are packed; see `CodesField`. K has ``token``, V ``channel``.
    levels : Levels
        What codes stand for.
    sides : tuple of Side
        In the order of decoding.
    rule : str
        How codes and sides are chosen, by its name in `kvpact.methods.rules`. A rule that no kernel
        knows is computed by torch, and so is attention over sides in an order that none knows:
        kernels take numbers per token, multiplied before they are added, before (V) or after (K)
        those per group of tokens.
    limit : float
        Tokens without a larger magnitude can be encoded, whatever else they are.

    Raises
    ------
    RegistrationError
        Levels or sides are none that there are, or the rule chooses others.
    """

    dim: int
    order: Order
    levels: Levels
    sides: tuple[Side, ...]
    rule: str
    limit: float = math.inf

    def __post_init__(self) -> None:
        levels, sides = self.levels, self.sides
        _require(self.order in _ORDERS, f"order={self.order!r}", "'token' or 'channel'")
        levels.check()
        names = [side.name for side in sides]
        _require(
            len({*names, self.codes}) == len(names) + 1, f"sides {names}", "of different names"
        )
        for side in sides:
            side.check()
        groups = {side.tokens for side in sides} - {1}
        _require(len(groups) < 2, f"groups of {groups}", "of equally many tokens")
        widths = {side.channels for side in sides if side.tokens == 1}
        _require(len(widths) < 2, f"groups of {widths} channels", "equally wide")
        adds = any(side.op == "add" for side in sides)
        _require(not (adds and levels.zero_code), "zero_code beside a side that is added", "0")
        if self.rule in RULES_OF:
            found = tuple((side.name, side.op, side.tokens == 1) for side in sides)
            wanted = RULES_OF[self.rule].get(levels.kind)
            what = f"rule {self.rule!r} for a {levels.kind}"
            kinds = ", ".join(RULES_OF[self.rule])
            _require(wanted is not None, what, f"for one of: {kinds}")
            _require(found in (wanted or ()), f"{what} with sides {found}", f"one of {wanted}")
            one = levels.kind != "grid" or self.rule == "balance"
            _require(not (one and self.channels), f"{what} with channels", "one scale per token")

    @property
    def codes(self) -> str:
        """Name of the field of codes."""
        return "values" if self.levels.kind == "raw" else "codes"

    @property
    def group(self) -> int:
        """Tokens that are encoded together; 1 for none."""
        return max((side.tokens for side in self.sides), default=1)

    @property
    def channels(self) -> int:
        """Channels that share a scale; 0 for all."""
        return max((side.channels for side in self.sides), default=0)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """What is stored: codes, then sides."""
        kind, bits = self.levels.kind, self.levels.bits
        codes: Field
        if kind in ("float", "raw"):
            dtype = torch.uint8 if kind == "float" else DTYPES[self.levels.number]
            codes = TokenField(self.codes, self.dim, dtype, "codes")
        else:
            codes = CodesField(self.codes, bits, self.dim, self.order)
        return (codes, *map(self._field, self.sides))

    def _field(self, side: Side) -> Field:
        if side.tokens > 1:
            return GroupField(side.name, self.dim, side.tokens)
        return TokenField(side.name, -(-self.dim // (side.channels or self.dim)))

    def _name(self, op: str, by_token: bool) -> str | None:
        """Return the name of the side that does this, per token or per group; None for none."""
        found = (x.name for x in self.sides if x.op == op and (x.tokens == 1) == by_token)
        return next(found, None)

    @cached_property
    def packed_format(self) -> PackedFormat | None:
        """How kernels decode the slots; None where they know no such order of sides."""
        ops = tuple(f"{side.op} {'t' if side.tokens == 1 else 'g'}" for side in self.sides)
        if ops not in _ORDERS[self.order] or (self.group > 1 and self.channels):
            return None
        if ops == ("mul t", "add g") and self.levels.kind == "grid":
            return None  # what kernels take off a grid's codes is not multiplied there
        levels = self.levels
        kind: Any = levels.number
        names: dict[str, Any] = {
            "scale": self._name("mul", True),
            "zero": self._name("add", True),
            "fold": self._name("mul", False),
            "shift": self._name("add", False),
            "channels": self.channels,
            "group": 0 if self.group == 1 else self.group,
            "shift_scaled": ops == ("mul g", "add g", "mul t"),
        }
        if levels.kind == "grid":
            # Up to 16 levels fit into the table of one vector register; more are computed: they are
            # added to 2**23, where fp32 has no fractions.
            kind = "table" if levels.bits <= 4 else "linear"
            middle, count = 0.0, 1 << levels.bits
            if any(side.op == "add" for side in self.sides):
                middle = (count - 1) / 2 if kind == "table" else count / 2
            numbers = tuple(float(code - (middle or levels.zero_code)) for code in range(count))
            return PackedFormat(kind, levels.bits, numbers, middle=middle, **names)
        if levels.kind == "book":
            return PackedFormat("table", levels.bits, levels.values, unit=levels.unit, **names)
        if levels.kind == "raw":
            return PackedFormat("raw", levels.bits, codes=self.codes, **names)
        return PackedFormat(kind, levels.bits, **names)

    @cached_property
    def encoding(self) -> Encoding | None:
        """How kernels encode; None where none knows the rule for such levels."""
        levels, group = self.levels, self.group  # sides are those of the rule: it was checked
        bits, limit, channels = levels.bits, self.limit, self.channels
        what = levels.kind, self.rule
        if what == ("grid", "absmax"):
            return Encoding("symmetric", bits, limit, channels=channels)
        if what == ("grid", "minmax"):
            kind: Literal["affine", "channel"] = "affine" if group == 1 else "channel"
            return Encoding(kind, bits, limit, group=group, channels=channels)
        if what == ("grid", "balance"):
            return Encoding("balanced", bits, limit, group=group)
        if what == ("float", "absmax"):
            return Encoding("float8", bits, limit, levels.number)
        if levels.kind == "book" and self.rule in CODEBOOK_RULES:
            book = torch.tensor(levels.values, dtype=torch.float32, device="cpu") * levels.unit
            return Encoding("codebook", bits, limit, self.rule, group, levels=tuple(book.tolist()))
        return None
