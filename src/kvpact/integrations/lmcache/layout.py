"""Layouts of K and V in LMCache's chunks.

LMCache gives a chunk's tensor with its shape and nothing of heads, so their widths are options:

- `[L, T, H * (D + D_v)]`: each head's K and V side by side, as vLLM has them since 0.26; and
  latents, which are one head with `D` of `c_kv` and `D_v` of `k_rope`. A 1 may stand in front.
- `[2, L, T, H * D]`: all of K, then all of V.

vLLM's CPU worker has the first shape, and other numbers in it: of a page and head K of all tokens,
then V of all tokens, each in an order that its instructions like. So its pages are an option, too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable, GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.chunks import Shape


@dataclass(frozen=True)
class CPUPages:
    """vLLM's pages on a CPU, of `tokens`; `orders`: by dtype, where K's and V's numbers lie."""

    tokens: int
    orders: Callable[[torch.dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ChunkLayout:
    """The widths of a head. `pages`: where the engine is vLLM's CPU worker."""

    head_dim: int
    value_dim: int
    pages: CPUPages | None = None

    def __post_init__(self) -> None:
        for name in ("head_dim", "value_dim"):
            width = getattr(self, name)
            if type(width) is not int or width < 1:
                raise GeometryError(f"{name}={width!r} should be the width of a head, as 128")
        if self.pages is not None and self.head_dim != self.value_dim:
            raise GeometryError(
                f"head_dim={self.head_dim} and value_dim={self.value_dim}: K and V have one width "
                "in vLLM's CPU worker"
            )

    def __str__(self) -> str:
        pages = "" if self.pages is None else f", pages of {self.pages.tokens} tokens"
        return f"heads of width {self.head_dim} and {self.value_dim}{pages}"

    def check_model(self, name: str) -> None:
        """Raise `GeometryError` where a model's config, if it is here, has other widths."""
        right = _model_widths(name)
        if right is not None and right != (self.head_dim, self.value_dim):
            raise GeometryError(
                f"head_dim={self.head_dim} and value_dim={self.value_dim}, but the heads of {name} "
                f"have the widths {right[0]} and {right[1]}: set these"
            )

    def shapes(self, shape: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the shapes of K and V, `[L, H, T, D]`, in a tensor of LMCache's."""
        apart = len(shape) == 4 and shape[0] == 2
        inner = tuple(shape[1:] if len(shape) == 4 and shape[0] in (1, 2) else shape)
        width = self.head_dim if apart else self.head_dim + self.value_dim
        if (
            len(inner) != 3
            or min(inner) < 1
            or inner[2] % width
            or (apart and (self.head_dim != self.value_dim or self.pages is not None))
        ):
            raise GeometryError(
                f"LMCache's chunks have the shape {tuple(shape)}; with head_dim={self.head_dim} "
                f"and value_dim={self.value_dim} this should be [2, layers, tokens, heads * "
                f"{self.head_dim}] or [layers, tokens, heads * {self.head_dim + self.value_dim}]: "
                "set the widths of the model's heads"
            )
        layers, tokens, total = inner
        if self.pages is not None and tokens % self.pages.tokens:
            raise GeometryError(
                f"a chunk has {tokens} tokens, which are no whole number of pages of "
                f"{self.pages.tokens}: set cpu_block_size to vLLM's --block-size"
            )
        heads = total // width
        return (layers, heads, tokens, self.head_dim), (layers, heads, tokens, self.value_dim)

    def split(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, `[L, H, T, D]`. Errors as of `shapes`."""
        (layers, heads, tokens, dim), _ = self.shapes(chunk.shape)
        if self.pages is None:
            return self._sides(chunk, heads)
        halves = self._halves(chunk, heads)
        k, v = (
            halves[:, :, :, side, order].view(layers, -1, heads, self.pages.tokens, dim)
            for side, order in enumerate(self.pages.orders(chunk.dtype))
        )
        shape = (layers, heads, tokens, dim)
        return k.transpose(1, 2).reshape(shape), v.transpose(1, 2).reshape(shape)

    def join(self, k: Tensor, v: Tensor, chunk: Tensor) -> None:
        """Write K and V, `[L, H, T, D]`, into a chunk."""
        (layers, heads, _, _), _ = self.shapes(chunk.shape)
        if self.pages is None:
            for place, given in zip(self._sides(chunk, heads), (k, v), strict=True):
                place.copy_(given)
            return
        halves = self._halves(chunk, heads)
        orders = self.pages.orders(chunk.dtype)
        for side, given in enumerate((k, v)):
            pages = torch.unflatten(given, 2, (-1, self.pages.tokens)).transpose(1, 2)
            halves[:, :, :, side, orders[side]] = pages.flatten(3)
        rows = halves.view(layers, halves.shape[1], heads, self.pages.tokens, -1)
        chunk.copy_(rows.transpose(2, 3).reshape(chunk.shape))

    def _sides(self, chunk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return K and V as views."""
        rows = torch.unflatten(chunk, -1, (heads, -1)).transpose(-2, -3)
        if chunk.dim() == 4 and chunk.shape[0] == 2:
            return rows[0], rows[1]
        rows = rows[0] if chunk.dim() == 4 else rows
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def _halves(self, chunk: Tensor, heads: int) -> Tensor:
        """Return a copy by pages: `[L, pages, H, 2, numbers of K or V]`."""
        assert self.pages is not None
        shape = (*chunk.shape[-3:-2], -1, self.pages.tokens, heads, 2 * self.head_dim)
        pages = chunk.reshape(shape).transpose(2, 3)
        return pages.reshape(*pages.shape[:3], 2, -1).clone()


@cache
def _model_widths(name: str) -> tuple[int, int] | None:
    """Return the widths of K and V in a model's folder, or in the cache of Hugging Face."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = Path(name, "config.json")
        found = path if path.is_file() else try_to_load_from_cache(name, path.name)
        if not isinstance(found, str | Path):
            return None
        shape = CacheGeometry.from_config(json.loads(Path(found).read_text("utf-8")))
    except (OSError, ValueError):  # there is none, or it tells no widths that all layers have
        return None
    return shape.head_dim, shape.value_dim


def cpu_pages(tokens: int, dim: int) -> CPUPages:
    """Return the pages of vLLM's CPU worker on this machine, whose order its own kernel defines."""
    if type(tokens) is not int or tokens < 1:
        raise GeometryError(f"cpu_block_size={tokens!r} should be vLLM's --block-size, as 128")
    try:
        from kvpact.integrations.vllm.cpu_attention import page_orders
    except ImportError as error:
        raise BackendUnavailable(
            f"cpu_block_size asks vLLM's own kernel for the order of its pages, and vLLM can't be "
            f"imported here ({error}): install it next to LMCache"
        ) from error

    @cache
    def orders(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return page_orders(None, tokens, dim, dtype)

    return CPUPages(tokens, orders)
