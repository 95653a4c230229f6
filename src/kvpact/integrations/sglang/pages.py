"""The layout of K and V in a flat page of SGLang's host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.integrations.chunks import Shape

_ORDERS = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "LTHD",
    "page_head": "HTLD",
}
"""Order of layers, tokens, heads and widths in K and in V, by ``--hicache-mem-layout``."""


@dataclass(frozen=True)
class PageLayout:
    """A page of `tokens`: numbers of K, then of V, `order` as in `_ORDERS`."""

    layers: int
    heads: int
    tokens: int
    head_dim: int
    order: str

    @classmethod
    def of(cls, pool: Any) -> Self:
        """Return the layout of a pool of SGLang's host memory. Raises `GeometryError`."""
        names = ("layout", "layer_num", "head_num", "page_size", "head_dim")
        missing = [name for name in names if not hasattr(pool, name)]
        if missing or getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
            raise GeometryError(
                f"SGLang's {type(pool).__name__} is not covered: latents and K and V of unlike "
                "widths have pages of another form; leave the storage backend out"
            )
        if pool.layout not in _ORDERS:
            raise GeometryError(
                f"--hicache-mem-layout {pool.layout} is not covered: take {', '.join(_ORDERS)}"
            )
        order = _ORDERS[pool.layout]
        return cls(pool.layer_num, pool.head_num, pool.page_size, pool.head_dim, order)

    def __str__(self) -> str:
        return (
            f"pages of {self.tokens} tokens, {self.layers} layers, {self.heads} heads of width "
            f"{self.head_dim}"
        )

    @property
    def value_dim(self) -> int:
        """The width of V, which is that of K."""
        return self.head_dim

    @property
    def numbers(self) -> int:
        """Numbers of a page."""
        return 2 * prod(self._sizes().values())

    def _sizes(self) -> dict[str, int]:
        return {"L": self.layers, "H": self.heads, "T": self.tokens, "D": self.head_dim}

    def shapes(self, shape: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the shapes of K and V. Raises `GeometryError`."""
        if tuple(shape) != (self.numbers,):
            raise GeometryError(
                f"a page of the shape {tuple(shape)}, where {self} are {self.numbers} numbers"
            )
        inner = tuple(self._sizes().values())
        return inner, inner

    def split(self, page: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, `[L, H, T, D]`, as views. Raises `GeometryError`."""
        self.shapes(page.shape)
        sizes = self._sizes()
        sides = page.view(2, *(sizes[axis] for axis in self.order))
        k, v = sides.permute(0, *(1 + self.order.index(axis) for axis in sizes))
        return k, v

    def join(self, k: Tensor, v: Tensor, page: Tensor) -> None:
        """Write K and V into a page."""
        for place, given in zip(self.split(page), (k, v), strict=True):
            place.copy_(given)
