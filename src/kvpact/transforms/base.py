"""Orthogonal transforms that are applied before quantising and never undone per token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transform(Protocol):
    """An orthogonal map of vectors: `forward(q) @ forward(k) == q @ k`.

    The attention applies `forward` to q once and `inverse` to the output once; what is cached
    stays transformed.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` (fp32) to `[..., D]`."""
        ...

    def inverse(self, y: Tensor) -> Tensor:
        """Undo `forward`."""
        ...


class NoTransform:
    """No transform."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def inverse(self, y: Tensor) -> Tensor:
        """Return `y`."""
        return y


IDENTITY = NoTransform()
