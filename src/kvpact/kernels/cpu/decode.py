"""Decoding by the native kernels: the torch body's numbers, to the bit."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import GeometryError, KernelError
from kvpact.kernels.base import SlotReader
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, slot_format
from kvpact.kernels.cpu.structs import DecodeArgs
from kvpact.kernels.dense import check_out


def decode(
    library: NativeLibrary, slots: SlotReader, start: int, end: int, out: Tensor, inverse: bool
) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`."""
    form = slot_format(slots.codec)
    check_out(out, start, end, form.stream.dim)
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
