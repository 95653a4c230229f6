"""Shapes and tokens that the checks are made with."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset


@dataclass(frozen=True)
class Shape:
    """One odd shape.

    Parameters
    ----------
    batch, heads : int
        Rows, and KV heads.
    pieces : tuple of int
        Tokens, as they come piece by piece.
    dim, v_dim : int
        Width of K and of V.
    dtype : torch.dtype
        Of K and V.
    """

    batch: int
    heads: int
    pieces: tuple[int, ...]
    dim: int
    v_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch}-H{self.heads}-T{self.tokens}-D{self.dim}x{self.v_dim}-{dtype}"

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return sum(self.pieces)

    def geometry(self, layers: int = 1) -> CacheGeometry:
        """Return the geometry of a cache of that shape."""
        return CacheGeometry(layers, self.heads, self.dim, self.v_dim, self.dtype)


# Every width, number of heads, rows, tokens and dtype of interest, in few combinations: few tokens
# one by one, groups of 32, 64 and 128 tokens that are cut by pieces, more than two segments.
SHAPES = (
    Shape(1, 1, (1,), 64, 64, torch.float32),
    Shape(2, 3, (62, 1), 80, 96, torch.float16),
    Shape(1, 3, (1, 63, 1), 96, 80, torch.bfloat16),
    Shape(1, 1, (1,) * 65, 64, 128, torch.float32),
    Shape(2, 1, (129, 63, 65, 1), 128, 64, torch.float16),
    Shape(1, 1, (63, 65, 1, 64), 576, 512, torch.float32),
)


class ShapeKit:
    """Checks of a shape, made with every one of some.

    Attributes
    ----------
    shapes : tuple of Shape
        Those of checks that have a parameter ``shape``.
    """

    shapes: ClassVar[tuple[Shape, ...]] = SHAPES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give checks of a shape every one of them."""
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", self.shapes, ids=str)


def integers(*numbers: int) -> Tensor:
    """Return numbers as int64: padding, and indices of rows."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def floats(*numbers: float) -> Tensor:
    """Return numbers as fp32."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def by_name(k: Tensor, v: Tensor, q: Tensor | None = None) -> dict[str, Tensor]:
    """Return tensors under the names by which caches take them."""
    return {"k": k, "v": v} if q is None else {"k": k, "v": v, "q": q}


def random_tokens(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, offset: float = 0.0
) -> Tensor:
    """Return N(0, 1) numbers `B, H, T, D`, the same ones for the same arguments.

    Parameters
    ----------
    *shape, seed, dtype
        What is made; numbers are rounded to the dtype.
    offset : float
        Standard deviation of a constant that is added to each channel, as keys have it.
    """
    generator = torch.Generator().manual_seed(seed * 2 + 1)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if offset:
        # The constants depend on the width alone, so that every piece has the same.
        constants = torch.Generator().manual_seed(7)
        x = x + offset * x.new_empty(shape[-1]).normal_(generator=constants)
    return x.to(dtype)


def random_offset(heads: int, dim: int, *, norm: float = 10.0, seed: int = 0) -> KeyOffset:
    """Return a key offset in a few pairs of channels, the same for the same arguments.

    Parameters
    ----------
    heads, dim, norm, seed
        Of the keys, and of each head's bias; the seed chooses pairs and numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1e4 ** -(torch.arange(dim // 2, dtype=torch.float32, device="cpu") / (dim / 2))
    order = torch.randperm(dim // 2, generator=generator, dtype=torch.int64, device="cpu")
    pairs = order[: min(8, dim // 2)]
    bias = frequencies.new_empty(heads, len(pairs), 2).normal_(generator=generator)
    return KeyOffset(
        tuple(frequencies[pairs].tolist()),
        tuple((int(p), int(p) + dim // 2) for p in pairs),
        (norm * bias / bias.flatten(1).norm(dim=1).view(-1, 1, 1)).tolist(),
    )
