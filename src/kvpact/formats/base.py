"""Slots in tiles: how the codes and the side information of 32 tokens lie in memory.

A *field* is one tensor of a stream (K or V of a layer). Its storage is
`[B, H, units, *shape]`, where one unit covers `tokens` tokens, a multiple of the tile. A field
knows how to write tokens into storage, read them back, and clear what lies after a rollback.
Storage of tokens that are not there is zero: writing is a bitwise OR, and equal contents are
equal bytes. FORMAT_VERSION changes when any of this does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

FORMAT_VERSION = 1
Order = Literal["token", "channel"]
"""The contents of a word of codes: channels of a token (K), or tokens of a channel (V)."""


class Places(NamedTuple):
    """A token's bytes in a unit: `pieces` of `size` bytes, `step` apart, from `first[i]`."""

    first: tuple[int, ...]
    pieces: int
    step: int
    size: int


class Field(ABC):
    """One stored tensor of a stream; subclasses are frozen dataclasses.

    Attributes
    ----------
    name : str
        Name within the stream.
    kind : {"codes", "side"}
        Codes, or information about them.
    dtype : torch.dtype
        Dtype of the storage.
    tokens : int
        Tokens that one unit of storage covers.
    per_group : bool
        Whether values come per group of tokens rather than per token.
    """

    name: str
    kind: Literal["codes", "side"]
    dtype: torch.dtype
    tokens: int
    per_group: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one unit."""

    @property
    def places(self) -> Places | None:
        """The places of a unit's tokens; None where some share a byte, or what is stored."""
        return None

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token and head takes in this field."""
        return prod(self.shape) * self.dtype.itemsize / self.tokens

    def allocate(self, batch: int, heads: int, tokens: int, device: torch.device) -> Tensor:
        """Return zeroed storage for `tokens` tokens (a multiple of `self.tokens`)."""
        units = tokens // self.tokens
        return torch.zeros(batch, heads, units, *self.shape, dtype=self.dtype, device=device)

    @abstractmethod
    def write(self, storage: Tensor, start: int, values: Tensor) -> None:
        """Write `values` for the tokens from `start` on; their storage is zero so far."""

    @abstractmethod
    def read(self, storage: Tensor) -> Tensor:
        """Return the values of all tokens in `storage`."""

    @abstractmethod
    def clear_from(self, storage: Tensor, start: int) -> None:
        """Zero the storage of the tokens from `start` on."""
