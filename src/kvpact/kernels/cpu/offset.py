"""Key offsets for the native kernels: one table of cosines and sines for all layers."""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.kernels.offset import RowOffset
from kvpact.key_offset import KeyOffset
from kvpact.key_rotation import rotations

LEAST = 1024
"""Positions of the smallest table."""
SLACK = 64
"""Numbers after the last position: vectors are read whole."""


class _Table:
    """Cosines and sines by frequency and position; who reads a replaced table keeps it."""

    def __init__(self, scaling: float, dtype: torch.dtype) -> None:
        self._scaling, self._dtype, self._lock = scaling, dtype, threading.Lock()
        self._rows: dict[float, int] = {}
        self._numbers = torch.empty(0, 2, SLACK, dtype=torch.float32, device="cpu")

    def rows(self, frequencies: tuple[float, ...]) -> list[int]:
        """Return the rows of frequencies, which stay theirs."""
        with self._lock:
            return [self._rows.setdefault(x, len(self._rows)) for x in frequencies]

    def covering(self, positions: int) -> Tensor:
        """Return `[rows, 2, length + SLACK]` for so many positions at least."""
        known = self._numbers
        if known.shape[0] == len(self._rows) and known.shape[2] >= positions + SLACK:
            return known
        with self._lock:
            length = max(self._numbers.shape[2] - SLACK, LEAST)
            while length < positions:
                length *= 2
            frequencies = torch.tensor(list(self._rows), dtype=torch.float32, device="cpu")
            every = torch.arange(length + SLACK, dtype=torch.int64, device="cpu")
            pair = rotations(frequencies, every, self._scaling, self._dtype)
            self._numbers = torch.stack([x.T for x in pair], 1).contiguous()
            return self._numbers


class _RowNumbers(NamedTuple):
    """An offset's `[P, 3]` int32 (both channels, row of the table) and `[H, P, 2]` biases."""

    channels: Tensor
    bias: Tensor
    table: _Table


_tables: dict[tuple[float, torch.dtype], _Table] = {}
_made: WeakKeyDictionary[KeyOffset, _RowNumbers] = WeakKeyDictionary()


def _numbers(offset: KeyOffset) -> _RowNumbers:
    found = _made.get(offset)
    if found is None:
        given = offset.scaling, offset.dtype
        table = _tables.setdefault(given, _Table(*given))
        pairs = zip(offset.channels, table.rows(offset.frequencies), strict=True)
        channels = torch.tensor(
            [[*pair, row] for pair, row in pairs], dtype=torch.int32, device="cpu"
        )
        bias = torch.tensor(offset.bias, dtype=torch.float32, device="cpu")
        found = _made[offset] = _RowNumbers(channels, bias, table)
    return found


class NativeOffset(NamedTuple):
    """Numbers of a `kvp_offset` of ``abi.h``, what they point to, and the tokens they reach."""

    args: tuple[int, ...]
    alive: list[Tensor]
    most: int


NO_OFFSET: tuple[int, ...] = (0,) * 6


def native_offset(offset: RowOffset, tokens: int) -> NativeOffset:
    """Return the arguments for an offset of the tokens in front of `tokens`."""
    channels, bias, made = _numbers(offset.offset)
    first = min(offset.origin, default=0) if offset.origin else 0
    table = made.covering(tokens - min(first, 0))
    alive, origin = [channels, bias, table], 0
    if offset.origin is not None:
        alive.append(torch.tensor(offset.origin, dtype=torch.int64, device="cpu"))
        origin = alive[-1].data_ptr()
    length = table.shape[2]
    args = (len(channels), channels.data_ptr(), bias.data_ptr(), table.data_ptr(), length, origin)
    return NativeOffset(args, alive, length - SLACK + min(first, 0))


def largest(offset: RowOffset) -> float:
    """Return the largest magnitude that an offset has in any channel."""
    bias = torch.tensor(offset.offset.bias, dtype=torch.float32, device="cpu")
    return float(bias.norm(dim=-1).max()) * abs(offset.offset.scaling) * 1.01
