"""Pages of one layer and chunks: the same bytes in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.integrations.vllm.page import PageForm

Copied = list[Tensor]
"""A layer's part of some pages: a tensor per field, `[pages, H, units, *shape]`."""


class PackedPages:
    """The pages of a layer that hold kvpact's slots.

    A chunk has the bytes of each field for all its pages, `[H, units, *shape]`, one field behind
    the other, those of K before those of V: what `PrefixCache` stores of a layer.

    `pages`: `[P, H, N, C]` uint8. Raises `GeometryError`.
    """

    def __init__(self, form: PageForm, pages: Tensor) -> None:
        self._device = pages.device
        self._fields = [tensor for side in form.fields(pages) for tensor in side.values()]
        self.page_bytes = sum(x[0].numel() * x.element_size() for x in self._fields)
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
