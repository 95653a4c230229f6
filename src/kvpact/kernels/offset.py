"""Parts of keys known by their positions: taken off before they are encoded, and put back."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.key_offset import KeyOffset
from kvpact.key_rotation import KeyRotation, rotations
from kvpact.methods import Codec


class _Numbers(NamedTuple):
    """An offset on one device: `[P]` frequencies and channels, `[H, 1, P]` biases."""

    frequencies: Tensor
    first: Tensor
    second: Tensor
    b0: Tensor
    b1: Tensor


_made: WeakKeyDictionary[KeyOffset, dict[torch.device, _Numbers]] = WeakKeyDictionary()


def _numbers(offset: KeyOffset, device: torch.device) -> _Numbers:
    """Return an offset's numbers on a device, made once."""
    known = _made.setdefault(offset, {})
    if device not in known:
        channels = torch.tensor(offset.channels, dtype=torch.int64, device=device)
        bias = torch.tensor(offset.bias, dtype=torch.float32, device=device).unsqueeze(1)
        frequencies = torch.tensor(offset.frequencies, dtype=torch.float32, device=device)
        first, second = channels.unbind(1)
        known[device] = _Numbers(frequencies, first, second, *bias.unbind(-1))
    return known[device]


def _positions(
    start: int, count: int, origin: tuple[int, ...] | None, device: torch.device
) -> Tensor:
    """Return the positions of consecutive tokens, `[B or 1, 1, count]`."""
    positions = torch.arange(start, start + count, dtype=torch.int64, device=device).view(1, 1, -1)
    if origin is None:
        return positions
    return positions - torch.tensor(origin, dtype=torch.int64, device=device).view(-1, 1, 1)


class RowOffset(NamedTuple):
    """A key offset; `origin`: each row's token at position 0; None where that is its first."""

    offset: KeyOffset
    origin: tuple[int, ...] | None = None

    def _turned(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of consecutive tokens, `[B or 1, 1, count, P]`."""
        positions, offset = _positions(start, count, self.origin, device), self.offset
        frequencies = _numbers(offset, device).frequencies
        return rotations(frequencies, positions, offset.scaling, offset.dtype)

    def without(self, x: Tensor, start: int) -> Tensor:
        """Return keys `[B, H, T, D]` from the token `start` on in fp32, the offset taken off."""
        return self._moved(x.to(torch.float32, copy=True), start, -1.0)

    def put_back(self, x: Tensor, start: int) -> Tensor:
        """Add the offset to fp32 keys `[B, H, T, D]` from the token `start` on, in place."""
        return self._moved(x, start, 1.0)

    def _moved(self, x: Tensor, start: int, sign: float) -> Tensor:
        numbers = _numbers(self.offset, x.device)
        cos, sin = self._turned(start, x.shape[2], x.device)
        b0, b1 = numbers.b0, numbers.b1
        x[..., numbers.first] += sign * (b0 * cos - b1 * sin)
        x[..., numbers.second] += sign * (b1 * cos + b0 * sin)
        return x

    def logits(self, rows: Tensor, start: int, end: int) -> Tensor:
        """Return `q · R_t b` of scaled queries for tokens `start <= t < end`: `[B, H, R, t]`."""
        numbers = _numbers(self.offset, rows.device)
        cos, sin = self._turned(start, end - start, rows.device)
        q0, q1 = rows[..., numbers.first], rows[..., numbers.second]
        along, across = q0 * numbers.b0 + q1 * numbers.b1, q1 * numbers.b0 - q0 * numbers.b1
        return along @ cos.mT + across @ sin.mT

    def begun_at(self, origin: tuple[int, ...] | None) -> RowOffset:
        """Return the offset with other tokens at position 0."""
        return self._replace(origin=origin)


class RowRotation(NamedTuple):
    """A key rotation; `origin`: each row's first token after padding; None: its first one."""

    rotation: KeyRotation
    origin: tuple[int, ...] | None = None

    @property
    def offset(self) -> None:
        """Nothing is taken off that logits would lack."""
        return None

    def without(self, x: Tensor, start: int) -> Tensor:
        """Return keys `[B, H, T, D]` from the token `start` on in fp32, not rotated."""
        positions = _positions(start, x.shape[2], self.origin, x.device)
        return self.rotation.turn(x.to(torch.float32, copy=True), positions, back=True)

    def put_back(self, x: Tensor, start: int) -> Tensor:
        """Rotate fp32 keys `[B, H, T, D]` from the token `start` on, in place."""
        positions = _positions(start, x.shape[2], self.origin, x.device)
        return self.rotation.turn(x, positions)

    def begun_at(self, origin: tuple[int, ...] | None) -> RowRotation:
        """Return the rotation with other tokens at position 0."""
        return self._replace(origin=origin)


KnownByPosition = RowOffset | RowRotation


def known_by_position(codec: Codec, key: bool, offset: KeyOffset | None) -> KnownByPosition | None:
    """Return what a stream takes off the tokens of K or V before a codec encodes them."""
    if not key or codec.exact:
        return None
    if codec.rotation is not None:
        return RowRotation(codec.rotation)
    return None if offset is None else RowOffset(offset)
