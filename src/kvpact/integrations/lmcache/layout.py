"""Where K and V lie in LMCache's chunks.

LMCache says of a chunk's tensor its shape and nothing of heads, so their widths are told to it:

- `[L, T, H * (D + D_v)]`: each head's K and V side by side, as vLLM has them since 0.26; and
  latents, which are one head with `D` of `c_kv` and `D_v` of `k_rope`. A 1 may stand in front.
- `[2, L, T, H * D]`: all of K, then all of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpact.errors import GeometryError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ChunkLayout:
    """The widths of a head.

    Parameters
    ----------
    head_dim : int
        Width of K.
    value_dim : int
        Width of V.

    Raises
    ------
    GeometryError
        A width is no positive whole number.
    """

    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("head_dim", "value_dim"):
            width = getattr(self, name)
            if type(width) is not int or width < 1:
                raise GeometryError(f"{name}={width!r} should be the width of a head, as 128")

    def shapes(self, shape: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the shapes of K and V, `[L, H, T, D]`, in a tensor of LMCache's.

        Raises
        ------
        GeometryError
            The tensor is none of those above, or the widths don't fit.
        """
        apart = len(shape) == 4 and shape[0] == 2
        inner = tuple(shape[1:] if len(shape) == 4 and shape[0] in (1, 2) else shape)
        width = self.head_dim if apart else self.head_dim + self.value_dim
        if (
            len(inner) != 3
            or min(inner) < 1
            or inner[2] % width
            or (apart and self.head_dim != self.value_dim)
        ):
            raise GeometryError(
                f"LMCache's chunks have the shape {tuple(shape)}; with head_dim={self.head_dim} "
                f"and value_dim={self.value_dim} this should be [2, layers, tokens, heads * "
                f"{self.head_dim}] or [layers, tokens, heads * {self.head_dim + self.value_dim}]: "
                "set the widths of the model's heads"
            )
        layers, tokens, total = inner
        heads = total // width
        return (layers, heads, tokens, self.head_dim), (layers, heads, tokens, self.value_dim)

    def split(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V as views, `[L, H, T, D]`. Errors as of `shapes`."""
        k_shape, _ = self.shapes(chunk.shape)
        heads = torch.unflatten(chunk, -1, (k_shape[1], -1)).transpose(-2, -3)
        if chunk.dim() == 4 and chunk.shape[0] == 2:
            return heads[0], heads[1]
        heads = heads[0] if chunk.dim() == 4 else heads
        return heads[..., : self.head_dim], heads[..., self.head_dim :]
