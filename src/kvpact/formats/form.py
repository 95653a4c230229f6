"""One description of a stream of known pieces: its fields follow from it, and kernels read it.

A vector is what its codes stand for (`Levels`), changed by each of its `sides` in their order, and
transformed back. With `kivi`, for one, `x ~ code * scale + zero`, where K's scale and zero are of a
channel and 32 tokens, V's of a token and 32 channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvpact.errors import RegistrationError
from kvpact.formats.base import Field, Order
from kvpact.formats.fields import CodesField, GroupField, TokenField, base_fields
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
    "trellis": {"trellis": ((),)},
    **{rule: {"book": ((_SCALE,), (_SCALE, _GROUP_MEAN))} for rule in CODEBOOK_RULES},
}
"""The rules of kvpact: for each kind of levels, which sides they choose, in which order."""

_TOKEN_ORDERS = ((), ("mul t",), ("mul t", "add t"))
_ORDERS = {
    "token": (*_TOKEN_ORDERS, ("mul g", "add g"), ("mul g", "add g", "mul t"), ("mul t", "add g")),
    "channel": (*_TOKEN_ORDERS, ("mul t", "add t", "mul g")),
}
"""Sides in an order that kernels know: of a token, or of a group of tokens."""

_PARTS = {"mul t": "scale", "add t": "zero", "mul g": "fold", "add g": "shift"}
_ENCODERS = {
    ("grid", "absmax"): "symmetric",
    ("grid", "minmax"): "affine",
    ("grid", "balance"): "balanced",
    ("float", "absmax"): "float8",
    ("trellis", "trellis"): "trellis",
    **{("book", rule): "codebook" for rule in CODEBOOK_RULES},
}


def _require(good: bool, what: str, wanted: str) -> None:
    if not good:
        raise RegistrationError(f"{what} should be {wanted}; see kvpact.formats.form")


@dataclass(frozen=True)
class TrellisBlock:
    """Channels with a trellis, and a rotation with signs of `seed`; without `bits` all are zero."""

    dim: int
    bits: int
    states: int
    seed: int


@dataclass(frozen=True)
class TrellisForm:
    """A vector: less its base, times its weights, in the order of its blocks.

    Weights, order, deviations and the first key are the codec's `state()`, per KV head. `codes`: of
    a vector, filled up if short; `interleave`: see `formats.bitpack`; `center`: tokens that share a
    mean; `first`: whether the first key is a base.
    """

    blocks: tuple[TrellisBlock, ...]
    codes: int
    interleave: int
    center: int = 0
    first: bool = False


@dataclass(frozen=True)
class Levels:
    """The numbers that codes stand for.

    Parameters
    ----------
    kind : {"grid", "book", "float", "raw", "trellis"}
        The code less `zero_code`; `values` times `unit`, by code; an 8-bit floating-point number;
        no code, but the number itself; a step of a `trellis`.
    bits : int
        Width of a code.
    values : tuple of float
        Of a book: `2**bits`; ascending, symmetric and without 0 where kvpact's rules choose them.
        Kernels multiply whole numbers from -128 to 127 exactly, in integers.
    unit : float
        What a value of 1 is worth.
    zero_code : int
        Of a grid.
    number : str
        ``e4m3`` or ``e5m2`` of floats; ``fp16``, ``bf16`` or ``fp32`` of raw numbers.
    trellis : TrellisForm or None
        Whose codes they are.
    """

    kind: Literal["grid", "book", "float", "raw", "trellis"]
    bits: int
    values: tuple[float, ...] = ()
    unit: float = 1.0
    zero_code: int = 0
    number: str = ""
    trellis: TrellisForm | None = None

    def check(self) -> None:
        """Raise `RegistrationError` unless there are such levels."""
        kind, bits, values = self.kind, self.bits, self.values
        known = ("grid", "book", "float", "raw", "trellis")
        _require(kind in known, f"levels of kind {kind!r}", f"one of {', '.join(known)}")
        given = (kind == "trellis") == (self.trellis is not None)
        _require(given, f"levels of kind {kind!r}", "with a trellis if they are those of one")
        if kind == "grid":
            _require(2 <= bits <= 8, f"a grid of {bits} bits", "of 2 to 8")
            _require(0 <= self.zero_code < 1 << bits, f"zero_code={self.zero_code}", "a code")
        elif kind == "book":
            _require(1 <= bits <= 8 and len(values) == 1 << bits, "the values of a book", "2**bits")
        elif kind == "float":
            good = self.number in ("e4m3", "e5m2") and bits == 8
            _require(good, f"floats {self.number!r} of {bits} bits", "e4m3 or e5m2, of 8")
        elif kind == "raw":
            dtype = DTYPES.get(self.number)
            good = dtype is not None and bits == 8 * dtype.itemsize
            _require(good, f"raw numbers {self.number!r} of {bits} bits", "fp16, bf16 or fp32")


@dataclass(frozen=True)
class Side:
    """Numbers stored with the codes (fp16), and what is done with them.

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
        _require(not (adds and levels.zero_code), "zero_code with a side that is added", "0")
        if self.rule in RULES_OF:
            found = tuple((side.name, side.op, side.tokens == 1) for side in sides)
            wanted = RULES_OF[self.rule].get(levels.kind)
            what = f"rule {self.rule!r} for a {levels.kind}"
            kinds = ", ".join(RULES_OF[self.rule])
            _require(wanted is not None, what, f"for one of: {kinds}")
            _require(found in (wanted or ()), f"{what} with sides {found}", f"one of {wanted}")
            values = levels.values
            rising = all(a < b for a, b in pairwise(values))
            even = all(a == -b != 0 for a, b in zip(values, reversed(values), strict=True))
            _require(rising and even, "a book", "ascending, symmetric and without 0")
            one = levels.kind != "grid" or self.rule == "balance"
            wide = any(side.channels for side in sides)
            _require(not (one and wide), f"{what} with channels", "one scale per token")

    @property
    def bits(self) -> int:
        """Width of a code, the widest ones of a trellis."""
        return self.levels.bits

    @property
    def trellis(self) -> TrellisForm | None:
        """The trellis whose codes they are."""
        return self.levels.trellis

    @property
    def codes(self) -> str:
        """Name of the field of codes."""
        return "values" if self.levels.kind == "raw" else "codes"

    @property
    def in_words(self) -> bool:
        """True if codes are packed into words, in their `order`."""
        return self.levels.kind not in ("float", "raw")

    @cached_property
    def group(self) -> int:
        """Tokens that are encoded together; 1 for none."""
        center = self.trellis.center if self.trellis else 0
        return max((side.tokens for side in self.sides), default=center or 1)

    @cached_property
    def channels(self) -> int:
        """Channels that share a scale."""
        return min(max((side.channels for side in self.sides), default=0) or self.dim, self.dim)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that are stored: codes, then sides."""
        levels, codes = self.levels, self.codes
        if levels.trellis is not None:
            known = levels.trellis
            blocks = tuple((block.dim, block.bits) for block in known.blocks)
            several = blocks if len(blocks) > 1 else ()
            return (
                CodesField(codes, levels.bits, known.codes, self.order, known.interleave, several),
                TokenField("scale", 1, torch.uint8),
                *base_fields(self.dim, known.center, known.first),
            )
        sides = map(self._field, self.sides)
        if self.in_words:
            return (CodesField(codes, levels.bits, self.dim, self.order), *sides)
        dtype = torch.uint8 if levels.kind == "float" else DTYPES[levels.number]
        return (TokenField(codes, self.dim, dtype, "codes"), *sides)

    def _field(self, side: Side) -> Field:
        if side.tokens > 1:
            return GroupField(side.name, self.dim, side.tokens)
        return TokenField(side.name, -(-self.dim // (side.channels or self.dim)))

    @cached_property
    def parts(self) -> dict[str, Field]:
        """Fields by their parts in decoding: ``codes``, and whichever of these there are.

        With `level` the number that a code stands for, a vector is, for K and V::

            scale[token, channel group] * level + zero[token, channel group]

        or, with numbers per channel and group of tokens::

            K: scale[token] * (fold * level + shift)    if `shift_scaled`
            K: scale[token] * (fold * level) + shift    otherwise
            V: fold * (scale[token] * level + zero[token])

        Of a trellis also ``base``, ``mean`` and ``step``.
        """
        names = ["scale", "base", "mean", "step"]
        if self.trellis is None:
            names = [_PARTS[op] for op in self._ops]
        # Of two sides of one kind it is the first.
        return dict(reversed([*zip(["codes", *names], self.fields, strict=False)]))

    @cached_property
    def _ops(self) -> tuple[str, ...]:
        return tuple(f"{side.op} {'t' if side.tokens == 1 else 'g'}" for side in self.sides)

    @property
    def shift_scaled(self) -> bool:
        """True if the scale of a token multiplies the shift of its group, too."""
        return self._ops == ("mul g", "add g", "mul t")

    @cached_property
    def kind(self) -> str:
        """The kernels' way to decode; "" where they know no such order of sides.

        ``table``, ``linear``: codes index `numbers`, or the first of them is added to codes;
        ``raw``, ``e4m3``, ``e5m2``: there are no codes but numbers; ``trellis``.
        """
        levels, ops = self.levels, self._ops
        blocks = self.group > 1 and any(side.channels for side in self.sides)
        if blocks or ops not in _ORDERS[self.order]:
            return ""
        if levels.kind == "grid":
            if ops == ("mul t", "add g"):
                return ""  # what kernels take off a grid's codes is not multiplied there
            # Up to 16 levels fit into the table of one vector register; more are computed: they are
            # added to 2**23, where fp32 has no fractions.
            return "table" if levels.bits <= 4 else "linear"
        return {"book": "table", "float": levels.number}.get(levels.kind, levels.kind)

    @cached_property
    def encoder(self) -> str:
        """The kernels' way to encode, to the bit as the rule does; "" where none knows it.

        ``codebook``: levels of a book; ``symmetric``, ``affine``, ``channel``: GGUF's integers, or
        integers with a zero point, per token or per channel and group of tokens; ``float8``;
        ``balanced``: KVarN's tiles; ``trellis``.
        """
        found = _ENCODERS.get((self.levels.kind, self.rule), "")
        return "channel" if found == "affine" and self.group > 1 else found

    @property
    def middle(self) -> float:
        """The number subtracted from a grid's codes where a side is added.

        A grid that begins at its least number would lose bits where sums cancel.
        """
        if self.levels.kind != "grid" or not any(side.op == "add" for side in self.sides):
            return 0.0
        count = 1 << self.bits
        return (count - 1) / 2 if self.kind == "table" else count / 2

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of codes, in units and less `middle`; empty where kernels need no levels."""
        if self.levels.kind != "grid":
            return self.levels.values
        least = self.middle or self.levels.zero_code
        return tuple(float(code - least) for code in range(1 << self.bits))

    @property
    def points(self) -> Tensor:
        """Numbers times the unit, fp32 on the CPU; a zero where there are none."""
        numbers = self.numbers or (0.0,)
        return torch.tensor(numbers, dtype=torch.float32, device="cpu") * self.levels.unit

    @cached_property
    def unit(self) -> float:
        """The unit in which numbers are whole (8 bits), or 0.0; grids around a middle have halves.

        Kernels multiply such numbers exactly, in integers.
        """
        for parts in (1, 2):
            whole = [parts * number for number in self.numbers]
            if whole and all(float(x).is_integer() and -128 <= x <= 127 for x in whole):
                return self.levels.unit / parts
        return 0.0

    @cached_property
    def signed(self) -> bool:
        """True if a code is its number in two's complement, but for its top bit."""
        half = len(self.numbers) // 2
        return bool(half) and self.numbers == tuple(range(-half, half))
