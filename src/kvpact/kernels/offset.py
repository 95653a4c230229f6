"""What of keys is known by their positions (`KeyOffset`): taken off, put back, and as logits."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvpact.key_offset import KeyOffset


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
        channels = torch.tensor(offset.channels, device=device)
        bias = torch.tensor(offset.bias, device=device).unsqueeze(1)
        frequencies = torch.tensor(offset.frequencies, device=device)
        first, second = channels.unbind(1)
        known[device] = _Numbers(frequencies, first, second, *bias.unbind(-1))
    return known[device]


def rotations(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines in fp32, as models have them, alike on every machine.

    The angle is rounded to fp32. Its cosine is computed in fp64, so that no library's last bits are
    seen in fp32.

    Parameters
    ----------
    frequencies : Tensor
        `[P]` fp32, radians per position.
    positions : Tensor
        `[…]` whole numbers; those below 0 count as 0.
    scaling, dtype
        As of `KeyOffset`.

    Returns
    -------
    tuple of Tensor
        `[…, P]` each.
    """
    angles = (positions.clamp(min=0).to(torch.float32).unsqueeze(-1) * frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return (cos * scaling).to(dtype).float(), (sin * scaling).to(dtype).float()


class RowOffset(NamedTuple):
    """A key offset, and which token of each row stands at position 0.

    Parameters
    ----------
    offset : KeyOffset
        Of the layer.
    origin : tuple of int or None
        The token at position 0 of each row. None where it is each row's first.
    """

    offset: KeyOffset
    origin: tuple[int, ...] | None = None

    def _turned(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of consecutive tokens, `[B or 1, 1, count, P]`."""
        positions = torch.arange(start, start + count, device=device)
        if self.origin is not None:
            positions = positions - torch.tensor(self.origin, device=device).view(-1, 1, 1)
        offset = self.offset
        frequencies = _numbers(offset, device).frequencies
        cos, sin = rotations(frequencies, positions, offset.scaling, offset.dtype)
        return (cos, sin) if cos.dim() == 4 else (cos[None, None], sin[None, None])

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
        """Return `q · R_t b` for tokens `start <= t < end`: `[B, H, R, end - start]`.

        Parameters
        ----------
        rows : Tensor
            `[B, H, R, D]`, the scaled queries.
        """
        numbers = _numbers(self.offset, rows.device)
        cos, sin = self._turned(start, end - start, rows.device)
        q0, q1 = rows[..., numbers.first], rows[..., numbers.second]
        along, across = q0 * numbers.b0 + q1 * numbers.b1, q1 * numbers.b0 - q0 * numbers.b1
        return along @ cos.mT + across @ sin.mT

    def select(self, indices: Tensor) -> RowOffset:
        """Return the offset of the given batch rows."""
        if self.origin is None:
            return self
        return self._replace(origin=tuple(self.origin[row] for row in indices.tolist()))
