"""Scans of an index and copies of slots by the native library."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.cpu.library import library
from kvpact.kernels.cpu.structs import MOST_DIM, FieldStruct, GatherArgs, ScanArgs
from kvpact.kernels.sources import Pick, SegmentSource, copy_slots
from kvpact.quantizers.channels import GROUP
from kvpact.units import TILE


def covers(codes: Tensor, scale: Tensor, q: Tensor) -> bool:
    """Return whether the kernel scans such keys: whole groups, of a width in multiples of 32."""
    width, tokens = codes.shape[2], codes.shape[1]
    whole = width % TILE == 0 and width <= MOST_DIM and tokens % GROUP == 0
    same = codes.device == scale.device == q.device and codes.shape[0] == q.shape[0]
    return whole and same and q.dtype is torch.float32 and q.shape[3] == width


def scan(codes: Tensor, scale: Tensor, q: Tensor, weight: Tensor | None, out: Tensor) -> None:
    """Write the scores of packed keys into `out`; see `kernels.index.index_scores`."""
    codes, scale, q = codes.contiguous(), scale.contiguous(), q.contiguous()
    weight = None if weight is None else weight.float().contiguous()
    batch, queries, heads, dim = q.shape
    args = ScanArgs(
        codes.data_ptr(), scale.data_ptr(), q.data_ptr(),
        None if weight is None else weight.data_ptr(), out.data_ptr(), out.stride(-2),
        batch, queries, heads, codes.shape[1], dim, torch.get_num_threads(),
    )  # fmt: skip
    kernels = library()
    status = kernels.scan(kernels.bit, ctypes.byref(args))
    if status == 3:
        raise MemoryError("no memory for the scratch space of a scan")
    if status:
        raise KernelError(f"the native kernel refused to scan an index ({status})")


@lru_cache(maxsize=64)
def _places(first: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(first))(*first)


def gather(source: SegmentSource, pick: Pick, out: Tensor) -> None:
    """Do what `copy_slots` does."""
    where = source.where(pick.field.name)
    if where is None:
        copy_slots(source, pick, out)
        return
    _, pieces, step, size = pick.places
    items, places = pick.items.contiguous(), _places(pick.places.first)
    args = GatherArgs(
        FieldStruct(where.address, where.row, where.head),
        source.segment_tokens // pick.field.tokens, pick.unit,
        pick.row, pick.heads.start, pick.heads.stop - pick.heads.start,
        items.data_ptr(), len(items), ctypes.addressof(places), pick.inside,
        pieces, step, size, out.data_ptr(), out.stride(1) * out.itemsize,
    )  # fmt: skip
    library().gather(ctypes.byref(args))
