"""Learning by the native kernel: what keys of `trellis` learn from a cache's first tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.cpu.encode import CodecEncoder
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, SlotFormat, exact_tokens
from kvpact.kernels.cpu.structs import PROMPT, PromptPlan
from kvpact.kernels.cpu.trellis import TrellisArguments
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.methods.fitted import StateInOne
from kvpact.methods.trellis_learning import TrellisKeyCodec

_NO_NUMBER = 4
_NOTHING = (0,) * 4


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
    """What is told of a codec that has not learnt, whoever's tokens it learns from.

    `x`: `[B, H, T, D]`, tokens like those.
    """

    def __init__(self, codec: TrellisKeyCodec, args: ctypes.Structure, x: Tensor) -> None:
        self._codec, self._encoder = codec, CodecEncoder.of(codec)
        args.batch, heads, args.tokens, args.dim = x.shape
        args.heads, args.dtype = heads, DTYPES[x.dtype]
        args.trellis = self._encoder.args.trellis
        args.weighted, args.sorted = codec.weighted, codec.sorted
        fields = codec.state_fields()
        for name in fields:
            setattr(args, name, 1)
        self._parts = StateInOne.parts(fields, heads)
        count = max(part.end for part in self._parts.values())
        self._sizes = count, self._encoder.trellis.numbers(fields, heads, args.dim)

    def room(self) -> tuple[Tensor, Tensor, TrellisArguments]:
        """Return memory for what is learnt, and as kernels read it, and what is told of that."""
        state = new_state(self._sizes[0], torch.float16)
        numbers = new_state(self._sizes[1], torch.float32)
        return state, numbers, self._encoder.trellis.to_learn(numbers)

    def learnt(self, state: Tensor, arguments: TrellisArguments) -> TrellisKeyCodec:
        """Return the codec that learnt."""
        codec = self._codec.with_state(StateInOne(state, self._parts))
        for before in (self._encoder, SlotFormat.of(self._codec)):
            before.after(codec, arguments)
        return codec


def carry_out(library: NativeLibrary, call: bytes) -> bool:
    """Learn and encode; False where what is learnt is no number, and nothing is encoded."""
    status = library.prompt(library.bit, call)
    if status == 3:
        raise MemoryError("no memory for the scratch space of a prompt")
    if status not in (0, _NO_NUMBER):
        raise KernelError(f"the native kernel refused first tokens ({status}); nothing is stored")
    return bool(status == 0)


def learn(library: NativeLibrary, codec: Codec, x: Tensor, context: Context) -> Codec:
    """Return a codec that learnt; parameters as of `Backend.learn`.

    What is no number in fp16 the torch body learns, too, and names it.
    """
    if not isinstance(codec, TrellisKeyCodec):
        return codec
    plan, alive = PromptPlan(), list[Tensor]()
    learning, args = Learning(codec, plan.learn, x), plan.learn
    energy, padding = context.query_energy, context.padding
    args.sinks = context.sinks
    if padding is not None:
        padding = padding.to("cpu", torch.int64).expand(args.batch).contiguous()
        args.padding = padding.data_ptr()
    if energy is not None:
        energy = energy.to("cpu", torch.float32).expand(args.heads, args.dim).contiguous()
        args.query_energy = energy.data_ptr()
    state, numbers, arguments = learning.room()
    room = state.data_ptr(), numbers.data_ptr(), arguments.address
    tokens = *exact_tokens(x, alive), *_NOTHING, *_NOTHING
    call = ctypes.addressof(plan), *tokens, 0, 0, *room, *_NOTHING, torch.get_num_threads()
    if not carry_out(library, PROMPT.pack(*call)):
        return codec.learn(x.to(torch.float32), context)
    return learning.learnt(state, arguments)
