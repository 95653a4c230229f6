"""Random signs, then an orthonormal Hadamard transform: an orthogonal mixing of all channels.

`y = H D x` with D a diagonal of random signs and H the Walsh-Hadamard matrix over sqrt(n). The
signs come first: a Hadamard transform followed by signs would leave a constant offset of all
channels in one coordinate.

Where the width is no power of two, let n be the largest power of two below it. The transform is
applied to the first n channels, then (with signs of its own) to the last n; the two blocks overlap,
so that every channel spreads over the whole vector. Both steps are orthogonal, hence the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpact.arithmetic import hadamard

_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One step of Steele, Lea and Flood's SplitMix64: the same numbers everywhere, for ever."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@cache  # a CUDA graph may hold the address
def random_signs(count: int, seed: int, device: torch.device) -> Tensor:
    """Return `[count]` fp32 signs, a function of the seed alone."""
    state, signs = _splitmix64((seed * 2 + 1) & _MASK), []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        signs.append(1.0 - 2.0 * (_splitmix64(state) & 1))
    return torch.tensor(signs, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class RandomHadamard:
    """Signs and Hadamard transform for vectors of any width."""

    dim: int
    seed: int = 0

    @property
    def block(self) -> int:
        """Largest power of two that is not above `dim`."""
        return 1 << (self.dim.bit_length() - 1)

    def signs(self, device: torch.device) -> Tensor:
        """Return the signs of both blocks, `[dim + block]` fp32, as kernels read them."""
        return random_signs(self.dim + self.block, self.seed, device)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `[..., dim]`; computed in fp32."""
        n, signs, x = self.block, self.signs(x.device), x.to(torch.float32)
        x = x * signs[: self.dim]
        if n == self.dim:
            return hadamard(x)
        x = torch.cat([hadamard(x[..., :n]), x[..., n:]], dim=-1)
        last = hadamard(x[..., -n:] * signs[self.dim :])
        return torch.cat([x[..., :-n], last], dim=-1)

    def inverse(self, y: Tensor) -> Tensor:
        """Rotate back."""
        n, signs, y = self.block, self.signs(y.device), y.to(torch.float32)
        if n == self.dim:
            return hadamard(y) * signs[: self.dim]
        last = hadamard(y[..., -n:]) * signs[self.dim :]
        y = torch.cat([y[..., :-n], last], dim=-1)
        y = torch.cat([hadamard(y[..., :n]), y[..., n:]], dim=-1)
        return y * signs[: self.dim]
