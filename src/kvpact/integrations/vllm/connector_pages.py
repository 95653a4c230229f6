"""Pages of one layer and chunks: kvpact's slots, or vLLM's tokens, encoded and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.paged.pool import PageSource
from kvpact.errors import GeometryError
from kvpact.integrations.pages.page import PageForm
from kvpact.kernels import Plan, Segment, StreamPlan
from kvpact.methods import Codec

Copied = list[Tensor]
"""A layer's part of some pages: a tensor per field, `[pages, H, units, *shape]`."""


class PackedPages:
    """Pages of a layer, `[P, H, N, C]`, of kvpact's slots; a chunk has each field's, K's first."""

    def __init__(self, form: PageForm, pages: Tensor) -> None:
        self._hold([tensor for side in form.fields(pages) for tensor in side.values()])

    def _hold(self, fields: list[Tensor]) -> None:
        self._device, self._fields = fields[0].device, fields
        self.page_bytes = sum(x[0].numel() * x.element_size() for x in fields)
        """Bytes that `copy` takes for a page."""

    def copy(self, pages: Sequence[int]) -> Copied:
        """Return copies of some pages."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._device)
        return [field[index].cpu() for field in self._fields]

    def paste(self, pages: Sequence[int], copied: Copied, first: int) -> None:
        """Write copies to pages, from the `first` copied page on."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for field, part in zip(self._fields, copied, strict=True):
            field[index] = part[first : first + len(pages)].to(self._device)

    def pack(self, copied: Copied, each: int) -> Tensor:
        """Return chunks of `each` pages out of copies, `[chunks, n]` uint8."""
        parts = []
        for part in copied:
            by_head = part.view(-1, each, *part.shape[1:]).transpose(1, 2)
            parts.append(by_head.contiguous().flatten(1).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def unpack(self, chunks: Tensor, each: int) -> Copied:
        """Return copies of pages out of what `pack` gave."""
        copied, place = [], 0
        for field in self._fields:
            heads, units, *shape = field.shape[1:]
            size = each * field[0].numel() * field.element_size()
            # Copied: inside a chunk a field may begin where its dtype can't be viewed.
            part = chunks[:, place : place + size].clone().flatten().view(field.dtype)
            by_head = part.view(len(chunks), heads, each, units, *shape)
            copied.append(by_head.transpose(1, 2).flatten(0, 1))
            place += size
        return copied


class _BlockSlots(NamedTuple):
    codec: Codec
    source: PageSource


class PlainPages(PackedPages):
    """Pages `[P, H, N, 2 * D]` of tokens as they are; `orders`: of numbers of K and of V, int64."""

    def __init__(
        self, form: PageForm, plan: Plan, pages: Tensor, orders: tuple[Tensor, Tensor]
    ) -> None:
        heads, tokens, both = pages.shape[1:] if pages.dim() == 4 else (0, 0, 0)
        dim = both // 2
        if (
            pages.dim() != 4
            or not pages.dtype.is_floating_point
            or tokens != form.tokens
            or any(order.shape != (tokens * dim,) for order in orders)
            or pages.stride()[1:] != (tokens * both, both, 1)
        ):
            raise GeometryError(
                f"vLLM hands over pages {tuple(pages.shape)} {pages.dtype} of strides "
                f"{pages.stride()}; kvpact reads [P, H, {form.tokens}, 2 D] with the tokens of a "
                "head side by side (VLLM_KV_CACHE_LAYOUT=LBHNC)"
            )
        self._form, self._plan, self._pages, self._orders = form, plan, pages, orders
        self._dim, self._heads = dim, heads
        self._hold([pages])

    def pack(self, copied: Copied, each: int) -> Tensor:
        """Encode; see `PackedPages.pack`. Raises `NonFiniteError`."""
        halves = copied[0].view(len(copied[0]), self._heads, 2, -1)
        packed, memory = self._packed(len(halves))
        for side, (plan, fields, order) in enumerate(self._sides(memory)):
            x = halves[:, :, side][:, :, order]
            x = x.view(*x.shape[:2], self._form.tokens, self._dim)
            encoder, what = plan.prepare(x.transpose(0, 1).flatten(1, 2).unsqueeze(0))
            encoder.write(what, PageSource(fields, tuple(range(len(x))), self._form.tokens), 0)
        return packed.pack(packed.copy(range(len(halves))), each)

    def unpack(self, chunks: Tensor, each: int) -> Copied:
        """Decode; see `PackedPages.unpack`."""
        count = len(chunks) * each
        packed, memory = self._packed(count)
        packed.paste(range(count), packed.unpack(chunks, each), 0)
        tokens = count * self._form.tokens
        copied = torch.empty(count, *self._pages.shape[1:], dtype=self._pages.dtype, device="cpu")
        halves = copied.view(count, self._heads, 2, -1)
        for side, (plan, fields, order) in enumerate(self._sides(memory)):
            slots = _BlockSlots(
                plan.codec, PageSource(fields, tuple(range(count)), self._form.tokens)
            )
            x = torch.empty(1, self._heads, tokens, self._dim, dtype=copied.dtype, device="cpu")
            plan.decode_slots(slots, 0, tokens, x)
            by_page = x[0].view(self._heads, count, -1).transpose(0, 1)
            halves[:, :, side, order] = by_page
        return [copied]

    def _packed(self, count: int) -> tuple[PackedPages, Tensor]:
        shape = (count, self._heads, self._form.tokens, self._form.content)
        memory = torch.zeros(shape, dtype=torch.uint8, device="cpu")
        return PackedPages(self._form, memory), memory

    def _sides(self, memory: Tensor) -> list[tuple[StreamPlan, Segment, Tensor]]:
        k, v = self._form.fields(memory)
        return [(self._plan.k, k, self._orders[0]), (self._plan.v, v, self._orders[1])]
