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
from kvpact.kernels.cpu.trellis import TrellisArguments
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.methods.trellis_learning import TrellisKeyCodec

NO_NUMBER = 4


def reason(codec: Codec) -> str:
    """Return why the kernel does not learn for a codec; empty if it does."""
    if codec.ready:
        return ""
    if not isinstance(codec, TrellisKeyCodec):
        return f"no native learning for {type(codec).__name__}"
    return CodecEncoder.of(codec).reason


def new_state(count: int, dtype: torch.dtype) -> Tensor:
    """Return memory for what is learnt, not written yet."""
    return torch.empty(count, dtype=dtype, device="cpu")


class Learning:
    """What stays from one layer to the next that learns: a `kvp_learn_args` but for addresses.

    `codec`: that has not learnt yet; `batch`, `heads`, `tokens`: of what it learns from.
    """

    def __init__(
        self, codec: TrellisKeyCodec, batch: int, heads: int, tokens: int, sinks: int
    ) -> None:
        self.codec, self.args = codec, LearnArgs()
        args, self._encoder = self.args, CodecEncoder.of(codec)
        fields, self._heads = codec.state_fields(), heads
        args.dim = self._encoder.dim
        args.batch, args.heads, args.tokens, args.sinks = batch, heads, tokens, sinks
        args.trellis = self._encoder.args.trellis
        args.weighted, args.sorted = codec.weighted, codec.sorted
        shapes = {name: heads * width for name, (width, _) in fields.items()}
        self._parts = [(x, sum(list(shapes.values())[:i]), fields[x]) for i, x in enumerate(shapes)]
        self._numbers = sum(shapes.values())

    def room(self, args: ctypes.Structure) -> tuple[dict[str, Tensor], TrellisArguments]:
        """Return memory for what is learnt, not written yet, which `args` are told of.

        It is one tensor: each that lives on costs more than it holds.
        """
        whole = new_state(self._numbers, torch.float16)
        address, found = whole.data_ptr(), {}
        for name, start, (width, dtype) in self._parts:
            part = whole[start : start + self._heads * width]
            found[name] = part.view(dtype).view(self._heads, width)
            setattr(args, name, address + start * whole.itemsize)
        arguments = self._encoder.trellis.to_learn(
            found, self._heads, self._encoder.dim, new_state
        )
        args.known = arguments.address
        return found, arguments

    def learnt(self, state: dict[str, Tensor], arguments: TrellisArguments) -> TrellisKeyCodec:
        """Return the codec that learnt."""
        codec = self.codec.with_state(state)
        for before in (self._encoder, SlotFormat.of(self.codec)):
            before.after(codec, arguments)
        return codec


def learn(library: NativeLibrary, codec: Codec, x: Tensor, context: Context) -> Codec:
    """Return a codec that learnt; parameters as of `Backend.learn`.

    What is no number in fp16 the torch body learns, too, and names it.
    """
    if not isinstance(codec, TrellisKeyCodec):
        return codec
    batch, heads, tokens, dim = x.shape
    learning, alive = Learning(codec, batch, heads, tokens, context.sinks), list[Tensor]()
    args, energy, padding = learning.args, context.query_energy, context.padding
    args.x, args.dtype = exact_tokens(x, alive), DTYPES[x.dtype]
    if padding is not None:
        padding = padding.to("cpu", torch.int64).expand(batch).contiguous()
        args.padding = padding.data_ptr()
    if energy is not None:
        energy = energy.to("cpu", torch.float32).expand(heads, dim).contiguous()
        args.query_energy = energy.data_ptr()
    args.threads = torch.get_num_threads()
    room = learning.room(args)
    status = library.learn(library.bit, ctypes.byref(args))
    if status == NO_NUMBER:
        return codec.learn(x.to(torch.float32), context)
    if status:
        raise KernelError(f"the native kernel that learns refused its arguments ({status})")
    return learning.learnt(*room)
