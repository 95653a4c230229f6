"""One description of a stream of known pieces: its fields and what kernels are told follow from it.

A vector is what its codes stand for (`Levels`), changed by each of its `sides` in their order, and
transformed back. With `kivi`, for one, `x ~ code * scale + zero`, where K's scale and zero are of a
channel and 32 tokens, V's of a token and 32 channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from kvpact.formats.base import Field
from kvpact.formats.encoding import Encoding
from kvpact.formats.fields import CodesField, GroupField, TokenField
from kvpact.formats.packed import PackedFormat, integer_format

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CODEBOOK_RULES = ("ls", "l2", "unbiased")


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
        knows is computed by torch.
    limit : float
        Tokens without a larger magnitude can be encoded, whatever else they are.
    """

    dim: int
    order: Literal["token", "channel"]
    levels: Levels
    sides: tuple[Side, ...]
    rule: str
    limit: float = math.inf

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
    def packed_format(self) -> PackedFormat:
        """How kernels decode the slots."""
        levels, ops = self.levels, [(side.op, side.tokens == 1) for side in self.sides]
        shift = self._name("add", False)
        names: dict[str, Any] = {
            "scale": self._name("mul", True),
            "zero": self._name("add", True),
            "fold": self._name("mul", False),
            "shift": shift,
            "channels": self.channels,
            "group": 0 if self.group == 1 else self.group,
            "shift_scaled": shift is not None and ("mul", True) in ops[ops.index(("add", False)) :],
        }
        if levels.kind == "grid":
            adds = any(op == "add" for op, _ in ops)
            return integer_format(levels.bits, None if adds else levels.zero_code, **names)
        if levels.kind == "book":
            return PackedFormat("table", levels.bits, levels.values, unit=levels.unit, **names)
        if levels.kind == "raw":
            return PackedFormat("raw", levels.bits, codes=self.codes, **names)
        kind: Literal["e4m3", "e5m2"] = "e4m3" if levels.number == "e4m3" else "e5m2"
        return PackedFormat(kind, levels.bits, **names)

    @cached_property
    def encoding(self) -> Encoding | None:
        """How kernels encode; None where none knows the rule for such levels."""
        levels, group = self.levels, self.group
        bits, limit, channels = levels.bits, self.limit, self.channels
        what = levels.kind, self.rule
        if what == ("grid", "absmax"):
            return Encoding("symmetric", bits, limit, channels=channels)
        if what == ("grid", "minmax"):
            kind: Literal["affine", "channel"] = "affine" if group == 1 else "channel"
            return Encoding(kind, bits, limit, group=group, channels=channels, zero="zero")
        if what == ("grid", "balance"):
            return Encoding("balanced", bits, limit, group=group, zero="zero", balance="balance")
        if what == ("float", "absmax"):
            scale = self._name("mul", True)
            return Encoding("float8", bits, limit, levels.number, scale=scale)
        if levels.kind == "book" and self.rule in CODEBOOK_RULES:
            book = torch.tensor(levels.values, dtype=torch.float32, device="cpu") * levels.unit
            return Encoding(
                "codebook",
                bits,
                limit,
                self.rule,
                group,
                levels=tuple(book.tolist()),
                boundaries=tuple(((book[1:] + book[:-1]) / 2).tolist()),
                mean=self._name("add", False),
            )
        return None
