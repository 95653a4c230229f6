"""Learning by the native kernel: what keys of `trellis` learn from a cache's first tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.cpu.encode import CodecEncoder
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, SlotFormat, exact_tokens
from kvpact.kernels.cpu.structs import LearnArgs
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.methods.trellis_learning import TrellisKeyCodec

_NO_NUMBER = 4


def reason(codec: Codec) -> str:
    """Return why the kernel does not learn for a codec; empty if it does."""
    if codec.ready:
        return ""
    if not isinstance(codec, TrellisKeyCodec):
        return f"no native learning for {type(codec).__name__}"
    return CodecEncoder.of(codec).reason


def new_state(heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return memory for what is learnt, `[heads, width]`, not written yet."""
    return torch.empty(heads, width, dtype=dtype, device="cpu")


def learn(library: NativeLibrary, codec: Codec, x: Tensor, context: Context) -> Codec:
    """Return a codec that learnt; parameters as of `Backend.learn`.

    What is no number in fp16 the torch body learns, too, and names it.
    """
    if not isinstance(codec, TrellisKeyCodec):
        return codec
    batch, heads, tokens, dim = x.shape
    found = {name: new_state(heads, *field) for name, field in codec.state_fields().items()}
    args, energy, padding = LearnArgs(), context.query_energy, context.padding
    alive: list[Tensor] = []
    args.x = exact_tokens(x, alive)
    args.dim, args.dtype = dim, DTYPES[x.dtype]
    args.batch, args.heads, args.tokens = batch, heads, tokens
    encoder = CodecEncoder.of(codec)
    args.trellis = encoder.args.trellis
    args.sinks = context.sinks
    if padding is not None:
        padding = padding.to("cpu", torch.int64).expand(batch).contiguous()
        args.padding = padding.data_ptr()
    if energy is not None:
        energy = energy.to("cpu", torch.float32).expand(heads, dim).contiguous()
        args.query_energy = energy.data_ptr()
    args.weighted, args.sorted = codec.weighted, codec.sorted
    for name, tensor in found.items():
        setattr(args, name, tensor.data_ptr())
    args.threads = torch.get_num_threads()
    status = library.learn(library.bit, ctypes.byref(args))
    if status == _NO_NUMBER:
        return codec.learn(x.to(torch.float32), context)
    if status:
        raise KernelError(f"the native kernel that learns refused its arguments ({status})")
    learnt = codec.with_state(found)
    arguments = encoder.trellis.learnt(learnt.state())
    for before in (encoder, SlotFormat.of(codec)):
        before.after(learnt, arguments)
    return learnt
