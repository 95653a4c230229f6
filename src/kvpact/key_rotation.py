"""RoPE as codecs undo it: which channels of a key turn together, and how fast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.errors import FormatError, GeometryError


def rotations(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[…, P]` of angles in fp32, computed in fp64; below 0 as 0."""
    angles = (positions.clamp(min=0).to(torch.float32).unsqueeze(-1) * frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return (cos * scaling).to(dtype).float(), (sin * scaling).to(dtype).float()


class KeyRotation(NamedTuple):
    """The rotation of keys at position t: pairs (i, j) of channels turn by `a = t f`; others stay.

    `k[i] = x[i] cos a - x[j] sin a`, `k[j] = x[j] cos a + x[i] sin a`; channels are int16.
    """

    frequencies: Tensor
    channels: Tensor

    @classmethod
    def of(cls, frequencies: Tensor, layout: str = "half") -> KeyRotation:
        """Return the rotation of a head's first 2 P channels, by RoPE's `[P]` frequencies."""
        if layout not in ("half", "interleaved") or frequencies.dim() != 1:
            raise GeometryError(
                f"a rotation has [P] frequencies and the layout 'half' or 'interleaved', not "
                f"{list(frequencies.shape)} and {layout!r}"
            )
        pairs = len(frequencies)
        first = torch.arange(pairs, dtype=torch.int16, device="cpu")
        channels = torch.stack([first, first + pairs], 1)
        if layout == "interleaved":
            channels = torch.arange(2 * pairs, dtype=torch.int16, device="cpu").view(pairs, 2)
        return cls(frequencies.detach().cpu().float().clone(), channels)

    def turn(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotate keys `[B, H, T, D]` in place by positions `[B or 1, 1, T]`, or undo it."""
        first, second = self.channels.to(x.device, torch.int64).unbind(1)
        cos, sin = rotations(self.frequencies.to(x.device), positions, 1.0, torch.float32)
        sin = -sin if back else sin
        a, b = x[..., first], x[..., second]
        x[..., first] = a * cos - b * sin
        x[..., second] = b * cos + a * sin
        return x

    def check(self, dim: int) -> None:
        """Raise `FormatError` unless it is a rotation of keys of width `dim`."""
        frequencies, channels = self
        good = frequencies.dim() == 1 and frequencies.dtype is torch.float32
        good = good and channels.dtype is torch.int16
        good = good and tuple(channels.shape) == (len(frequencies), 2)
        if good and len(frequencies):
            flat = channels.flatten().tolist()
            good = bool(frequencies.isfinite().all()) and len(set(flat)) == len(flat)
            good = good and min(flat) >= 0 and max(flat) < dim
        if not good:
            raise FormatError(f"not a rotation of keys of width {dim}")
