"""Decoding by the native kernel: what it covers, and its arguments.

The codec's `decode` and its transform's `inverse` define the numbers, to the bit. Everything is
checked here, before C++ is entered.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import DtypeError, GeometryError
from kvpact.kernels.cpu.decode_structs import DecodeArgs
from kvpact.kernels.cpu.slots import DTYPES, SegmentSource, slot_format
from kvpact.kernels.plan import Kernel
from kvpact.methods import Codec


def decoded(
    kernel: Kernel | None,
    codec: Codec,
    source: SegmentSource,
    packed: int,
    start: int,
    end: int,
    out: Tensor,
    inverse: bool,
) -> bool:
    """Decode packed tokens natively; or note why torch has to, and return False.

    Parameters
    ----------
    kernel : Kernel or None
        What computes; None for torch.
    codec : Codec
        Whose slots they are.
    source : SegmentSource
        The slots.
    packed : int
        Tokens that are in slots.
    start, end : int
        Tokens wanted.
    out : Tensor
        `[B, H, end - start, D]` fp32, fp16 or bf16, the last axis without gaps: the numbers. What
        is beyond fp16 becomes its largest number.
    inverse : bool
        Whether the codec's transform is undone.

    Raises
    ------
    GeometryError, DtypeError
        There are no such tokens, or `out` is not as described.
    """
    if not 0 <= start <= end <= packed:
        raise GeometryError(f"tokens {start} to {end} of {packed} packed ones")
    if out.dim() != 4 or out.shape[2] != end - start:
        raise GeometryError(f"out has shape {tuple(out.shape)}, not [B, H, {end - start}, D]")
    if out.dtype not in DTYPES:
        raise DtypeError(f"out is {out.dtype}; numbers are decoded to fp32, fp16 or bf16")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise GeometryError("the last axis of out has gaps")
    if kernel is None:
        return False
    if kernel.library is None:
        kernel.decodes["torch"] += 1
        return False
    reason = _decode(kernel, codec, source, start, end, out, inverse)
    kernel.decodes[f"torch: {reason}" if reason else "cpu"] += 1
    return not reason


def _decode(
    kernel: Kernel,
    codec: Codec,
    source: SegmentSource,
    start: int,
    end: int,
    out: Tensor,
    inverse: bool,
) -> str:
    """Fill `out`, or return why the kernel does not."""
    if out.device.type != "cpu":
        return f"device {out.device}"
    form = slot_format(codec)
    if form.reason:
        return form.reason
    if form.stream.dim != out.shape[3]:
        raise GeometryError(f"out is {out.shape[3]} wide, vectors are {form.stream.dim}")
    args = DecodeArgs(slots=form.stream)
    args.slots.segment_tokens = source.segment_tokens
    if not form.place(args.slots, source):
        return "slots with gaps in memory"
    if not inverse:
        args.slots.signs = None
    args.by_channel, args.dtype = form.by_channel, DTYPES[out.dtype]
    args.batch, args.heads = out.shape[:2]
    args.first, args.last = start, end
    size = out.element_size()
    args.row, args.head, args.token = (stride * size for stride in out.stride()[:3])
    args.out, args.threads = out.data_ptr(), torch.get_num_threads()
    assert kernel.library is not None
    status = kernel.library.decode(kernel.library.bit, ctypes.byref(args))
    assert status == 0, f"the decoder refused its arguments ({status})"
    return ""
