"""Methods with the mistakes that are made in practice; the kit has to find each."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from kvpact_ternary import Ternary, TernaryCodec

from kvpact.arithmetic import tree_sum
from kvpact.formats import GroupField


class DriftingCodec(TernaryCodec):
    """Takes a mean over all tokens of the call: pieces are stored otherwise than the whole."""

    def encode(self, x, frozen=None):
        return super().encode(x / (1 + x.abs().mean(dim=2, keepdim=True)))


class HidingCodec(TernaryCodec):
    """Keeps what it should have stored, in no field and in no count of bytes."""

    def encode(self, x, frozen=None):
        self.kept = x.clone()
        return super().encode(x)


class NotANumberCodec(TernaryCodec):
    """Divides by the number of large coordinates, of which a zero vector has none."""

    def encode(self, x, frozen=None):
        large = x.abs() > 0.7 * tree_sum(x.abs()) / x.shape[-1]
        scale = tree_sum(x.abs() * large) / tree_sum(large.float())
        return {**super().encode(x), "scale": scale.to(torch.float16)}


class UndeclaredCodec(TernaryCodec):
    """Returns an array that no field stores, and decodes with it."""

    def encode(self, x, frozen=None):
        return {**super().encode(x), "error": x * 0}


class BlankCodec(TernaryCodec):
    """Stores nothing of use."""

    def decode(self, arrays):
        return super().decode(arrays) * 0


class _Means(GroupField):
    def allocate(self, batch, heads, tokens, device):
        return torch.full_like(super().allocate(batch, heads, tokens, device), torch.nan)


class DirtyCodec(TernaryCodec):
    """Leaves garbage in slots without tokens, and recodes a group that a rollback has cut."""

    group = 32

    def __init__(self, dim, order):
        super().__init__(dim, order)
        self.fields = (*self.fields, _Means("mean", dim, 32))

    def encode(self, x, frozen=None):
        tiles = x if frozen is not None else torch.unflatten(x, 2, (-1, 32))
        mean = tree_sum(tiles, -2) / tiles.shape[-2]
        rest = x - mean if frozen is not None else (tiles - mean.half().float()).flatten(2, 3)
        return {**super().encode(rest), "mean": mean.half().squeeze(-2)}

    def decode(self, arrays):
        y = torch.unflatten(super().decode(arrays), 2, (-1, 32))
        return (y + arrays["mean"].float().unsqueeze(3)).flatten(2, 3)


@dataclass(frozen=True, kw_only=True)
class Drifting(Ternary):
    name: ClassVar[str] = "ternary_drifting"
    codec: ClassVar[type] = DriftingCodec


@dataclass(frozen=True, kw_only=True)
class Hiding(Ternary):
    name: ClassVar[str] = "ternary_hiding"
    codec: ClassVar[type] = HidingCodec


@dataclass(frozen=True, kw_only=True)
class NotANumber(Ternary):
    name: ClassVar[str] = "ternary_nan"
    codec: ClassVar[type] = NotANumberCodec


@dataclass(frozen=True, kw_only=True)
class Undeclared(Ternary):
    name: ClassVar[str] = "ternary_undeclared"
    codec: ClassVar[type] = UndeclaredCodec


@dataclass(frozen=True, kw_only=True)
class Blank(Ternary):
    name: ClassVar[str] = "ternary_blank"
    codec: ClassVar[type] = BlankCodec


@dataclass(frozen=True, kw_only=True)
class Dirty(Ternary):
    name: ClassVar[str] = "ternary_dirty"
    codec: ClassVar[type] = DirtyCodec


class Thawed(Ternary):
    """Can be changed after it was made, so that it can't be a key and what is stored may lie."""

    name = "ternary_thawed"

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)
