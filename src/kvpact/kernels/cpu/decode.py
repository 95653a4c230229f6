"""Decoding by the native kernels: the torch body's numbers, to the bit."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import DtypeError, GeometryError, KernelError
from kvpact.kernels.base import SlotReader
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, slot_format
from kvpact.kernels.cpu.structs import DecodeArgs


def decode(
    library: NativeLibrary, slots: SlotReader, start: int, end: int, out: Tensor, inverse: bool
) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`.

    Raises
    ------
    GeometryError, DtypeError
        `out` is not as described.
    """
    if out.dim() != 4 or not 0 <= start <= end or out.shape[2] != end - start:
        raise GeometryError(f"out has shape {tuple(out.shape)}, not [B, H, {end - start}, D]")
    if out.dtype not in DTYPES:
        raise DtypeError(f"out is {out.dtype}; numbers are decoded to fp32, fp16 or bf16")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise GeometryError("the last axis of out has gaps")
    form = slot_format(slots.codec)
    if form.stream.dim != out.shape[3]:
        raise GeometryError(f"out is {out.shape[3]} wide, vectors are {form.stream.dim}")
    args = DecodeArgs(slots=form.stream)
    args.slots.segment_tokens = slots.source.segment_tokens
    if not form.place(args.slots, slots.source):
        raise GeometryError("the slots have gaps in memory")
    if not inverse:
        args.slots.signs = None
    args.by_channel, args.dtype = form.by_channel, DTYPES[out.dtype]
    args.batch, args.heads = out.shape[:2]
    args.first, args.last = start, end
    size = out.element_size()
    args.row, args.head, args.token = (stride * size for stride in out.stride()[:3])
    args.out, args.threads = out.data_ptr(), torch.get_num_threads()
    status = library.decode(library.bit, ctypes.byref(args))
    if status:
        raise KernelError(f"the native decoder refused its arguments ({status})")
