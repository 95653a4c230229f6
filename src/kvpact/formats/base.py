"""Slots in tiles: how the codes and the side information of 32 tokens lie in memory.

A *field* is one tensor of a stream (K or V of a layer). Its storage is
`[B, H, units, *shape]`, where one unit covers `tokens` tokens, a multiple of the tile. A field
knows how to write tokens into storage, read them back, and clear what lies behind a rollback.
Storage of tokens that are not there is zero: writing is a bitwise OR, and equal contents are
equal bytes. FORMAT_VERSION changes when any of this does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

FORMAT_VERSION = 1
Order = Literal["token", "channel"]
"""What a word of codes holds: channels of a token (K), or tokens of a channel (V)."""


@dataclass(frozen=True)
class Field(ABC):
    """One stored tensor of a stream.

    Parameters
    ----------
    name : str
        Name within the stream.
    """

    name: str
    per_group: ClassVar[bool] = False
    """Whether values come per group of tokens rather than per token."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """``codes`` or ``side`` (information beside the codes)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the storage."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens that one unit of storage covers."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one unit."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token and head takes in this field."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize / self.tokens

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
