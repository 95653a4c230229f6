"""Slots page by page: for each page all fields of a stream, so that a page can be read alone."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import FormatError
from kvpact.snapshot.state import FieldInfo, StreamState


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    cuda: Any = torch.cuda  # its streams have no types
    stream: torch.cuda.Stream = cuda.Stream(device)
    return stream


def on_host(x: Tensor) -> Tensor:
    """Return a tensor on the CPU, from CUDA by page-locked memory and a stream of its own."""
    x = x.detach()
    if x.device.type != "cuda":
        return x.cpu()
    stream = _beside(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        copy = x.new_empty(x.shape, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    # The caller reads the copy on the CPU, and may free x.
    stream.synchronize()
    return copy


def page_bytes(fields: Sequence[FieldInfo], rows: int, page_size: int) -> int:
    """Return the bytes of a page of a stream, for `rows` = batch x heads."""
    units = ((rows * page_size // field.tokens, field) for field in fields)
    return sum(count * prod(field.shape) * field.dtype.itemsize for count, field in units)


def pack_pages(streams: Sequence[StreamState], pages: int, page_size: int) -> Tensor:
    """Return the bytes of K and V of a layer, `[P, n]` uint8: in a page field by field."""
    parts = [
        _paged(stream.slots.get(field.name), field, pages, page_size, stream.tail.shape[:2])
        for stream in streams
        for field in stream.fields
    ]
    out = outside_heap(pages, sum(part.shape[1] for part in parts))
    return torch.cat(parts, dim=1, out=out) if parts else out


def outside_heap(*shape: int) -> Tensor:
    """Return zeros, uint8, that take memory where they are written, and give all of it back."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, max(prod(shape), 1), **({"flags": private} if private else {}))
    return torch.frombuffer(memory, dtype=torch.uint8)[: prod(shape)].view(shape)


def _paged(
    slots: Tensor | None, field: FieldInfo, pages: int, page_size: int, rows: Sequence[int]
) -> Tensor:
    units = page_size // field.tokens
    storage = torch.zeros(*rows, pages * units, *field.shape, dtype=field.dtype, device="cpu")
    if slots is not None:
        held = on_host(slots[:, :, : pages * units])
        storage[:, :, : held.shape[2]] = held
    by_page = storage.view(*rows, pages, units, *field.shape)
    return by_page.movedim(2, 0).contiguous().view(torch.uint8).flatten(1)


def unpack_pages(
    data: Tensor, fields: Sequence[tuple[FieldInfo, ...]], rows: tuple[int, int], page_size: int
) -> list[Mapping[str, Tensor]]:
    """Return each stream's slots `[B, H, units, *shape]` by field, of what `pack_pages` gave."""
    found: list[Mapping[str, Tensor]] = []
    pages, place = data.shape[0], 0
    for stream in fields:
        slots = {}
        for field in stream:
            shape = (*rows, page_size // field.tokens, *field.shape)
            size = page_bytes([field], prod(rows), page_size)
            part, step = data[:, place : place + size], field.dtype.itemsize
            if (data.storage_offset() + place) % step or data.stride(0) % step:
                part = part.clone().flatten()  # a field may begin where its dtype can't be viewed
            storage = part.view(field.dtype).view(pages, *shape).movedim(0, 2)
            slots[field.name] = storage.flatten(2, 3).contiguous()
            place += size
        found.append(slots)
    if place != data.shape[1]:
        raise FormatError(f"a page has {data.shape[1]} bytes, its fields {place}")
    return found


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; the host does not wait for it to arrive."""
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
