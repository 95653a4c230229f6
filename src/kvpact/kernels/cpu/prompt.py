"""First tokens of a layer in one native call: what K learns of them, slots, tails and sinks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.base import AttendCall
from kvpact.kernels.cpu.attend import attend_native
from kvpact.kernels.cpu.encode import CodecEncoder, magnitudes
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, SlotFormat, exact_tokens
from kvpact.kernels.cpu.structs import PROMPT, PromptPlan
from kvpact.kernels.cpu.trellis import TrellisArguments
from kvpact.kernels.prompt import Limits, PromptPlace, PromptSide
from kvpact.kernels.torch.slots import copies
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
    """The arguments of a codec that has not learnt, from tokens like `x`, `[B, H, T, D]`."""

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
        """Return memory for what is learnt, the same as kernels read it, and its arguments."""
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
    """Return a codec that learnt (see `Backend.learn`); torch learns what is no number in fp16."""
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


_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Arguments in front of the threads in a call, but for the tokens."""
_Exact = tuple[int, int, int, int]


def covers(codecs: tuple[Codec, Codec], sides: tuple[PromptSide, ...], q: Tensor | None) -> bool:
    """Return whether one native call stores such first tokens."""
    dtype = sides[0].x.dtype
    if dtype not in DTYPES or dtype != sides[1].x.dtype or reason(codecs[0]):
        return False
    for codec, side in zip(codecs, sides, strict=True):
        encoder = CodecEncoder.of(codec)
        if copies(codec) or encoder.reason or (side.apart and encoder.args.signs):
            return False
    return q is None or q.dtype == dtype


class CpuPrompt:
    """Constants of all layers of a kind; see `PromptRunner`, and `Backend.prompt`."""

    def __init__(
        self,
        library: NativeLibrary,
        codecs: tuple[Codec, Codec],
        sides: tuple[PromptSide, PromptSide],
        q: Tensor | None,
        seen: tuple[int, int],
    ) -> None:
        self._library, self._codecs, self._learning = library, codecs, None
        plan, (key, value), codec = PromptPlan(), sides, codecs[0]
        self._plan, plan.tokens = plan, key.x.shape[2]
        plan.k_segments, plan.v_segments = (
            _fill(plan.k, codec, key),
            _fill(plan.v, codecs[1], value),
        )
        plan.k_tail, plan.v_tail = key.start, value.start
        plan.k_sinks, plan.v_sinks = key.sinks, value.sinks
        self._first = seen[0]
        if key.packed and not codec.ready and isinstance(codec, TrellisKeyCodec):
            self._learning = Learning(codec, plan.learn, key.x[:, :, : codec.learns_from])
            plan.learn.sinks = key.apart
            if q is not None:
                plan.learn.q_heads, plan.learn.q_tokens = q.shape[1], seen[1] - seen[0]
        self._address = ctypes.addressof(plan)

    def place(self, k: PromptPlace, v: PromptPlace) -> tuple[Codec, _Place]:
        """Return K's codec, and addresses."""
        codec, room = self._codecs[0], (0, 0, 0)
        if self._learning is not None:
            state, numbers, arguments = self._learning.room()
            codec = self._learning.learnt(state, arguments)
            room = state.data_ptr(), numbers.data_ptr(), arguments.address
        exact = (k.tail, v.tail, k.sinks, v.sinks)
        slots = tuple(side.table.__array_interface__["data"][0] for side in (k, v))
        return codec, (slots, (*room, *(0 if x is None else x.data_ptr() for x in exact)))

    def run(self, place: _Place, k: Tensor, v: Tensor, q: Tensor | None) -> bool:
        """Learn, encode and copy."""
        alive = list[Tensor]()
        queries = None if q is None else exact_tokens(q, alive)
        return self._run(place, exact_tokens(k, alive), exact_tokens(v, alive), queries)

    def attend(self, place: _Place, call: AttendCall, limits: Limits) -> Tensor | None:
        """Look at the numbers, store and attend."""
        alive, given = list[Tensor](), [x for x in (call.k, call.v, call.q) if x is not None]
        exact = [exact_tokens(x, alive) for x in given]
        sizes = magnitudes(self._library, given, exact)
        if not all(low <= x <= high for x, (low, high) in zip(sizes, limits, strict=True)):
            return None
        return attend_native(self._library, (call,), exact) if self._run(place, *exact) else None

    def _run(self, place: _Place, k: _Exact, v: _Exact, q: _Exact | None) -> bool:
        queries = _NOTHING
        if q is not None and self._learning is not None:
            at, row, head, token = q
            queries = at + self._first * token, row, head, token
        slots, rest = place
        call = self._address, *k, *v, *queries, *slots, *rest, torch.get_num_threads()
        return carry_out(self._library, PROMPT.pack(*call))


def _fill(args: ctypes.Structure, codec: Codec, side: PromptSide) -> int:
    """Write what stays; return how many segments there are."""
    encoder, source, segments = CodecEncoder.of(codec), side.source, 0
    ctypes.memmove(ctypes.addressof(args), ctypes.addressof(encoder.args), ctypes.sizeof(args))
    for name, field in encoder.fields.items():
        where = source.where(field.name)
        assert where is not None
        setattr(args, name, (where.field + 1, where.row, where.head))
        segments = where.table.shape[1]
    args.dtype, args.tokens, args.start = DTYPES[side.x.dtype], side.packed, 0
    args.batch, args.heads = side.x.shape[:2]
    args.segment_tokens, args.sinks = source.segment_tokens, side.apart
    return segments
