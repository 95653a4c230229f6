"""First tokens of a layer in one native call: what K learns of them, and the slots of K and V.

It stands for the calls that define it: `learn`, and the encoders' `write`. What depends on shapes
and codecs alone is made once for all layers that are alike.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.base import PromptShape
from kvpact.kernels.cpu.encode import CodecEncoder
from kvpact.kernels.cpu.learn import NO_NUMBER, Learning, reason
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.slots import DTYPES, exact_tokens
from kvpact.kernels.cpu.structs import EncodeArgs, PromptArgs
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.torch.slots import copies
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TrellisKeyCodec


def covers(k: Codec, v: Codec, shape: PromptShape) -> bool:
    """Whether one native call stores such first tokens."""
    if shape.k.dtype not in DTYPES or shape.k.dtype != shape.v.dtype or reason(k):
        return False
    for codec, sinks in zip((k, v), shape.sinks, strict=True):
        encoder = CodecEncoder.of(codec)
        if copies(codec) or encoder.reason or (sinks and encoder.args.signs):
            return False
    return shape.q is None or shape.q.dtype == shape.k.dtype


class CpuPrompt:
    """What stays from one layer to the next; see `PromptRunner`."""

    def __init__(self, library: NativeLibrary, k: Codec, v: Codec, shape: PromptShape) -> None:
        self._library, self._codec, self._alive = library, k, (k, v)
        self._learning: Learning | None = None
        args = self._args = PromptArgs()
        self._fields = _fill(args.k, k, 0, shape), _fill(args.v, v, 1, shape)
        if not k.ready and shape.packed[0]:
            assert isinstance(k, TrellisKeyCodec)
            batch, heads = shape.k.shape[:2]
            self._learning = Learning(k, batch, heads, k.learns_from, shape.sinks[0])
            args.learn = self._learning.args
            args.learn.dtype = DTYPES[shape.k.dtype]
            self._first, last = shape.seen
            if shape.q is not None:
                args.learn.q_heads, args.learn.q_tokens = shape.q.shape[1], last - self._first

    def run(
        self, k: Tensor, v: Tensor, q: Tensor | None, sources: tuple[SegmentSource, SegmentSource]
    ) -> Codec | None:
        """Learn and write."""
        args, alive = PromptArgs.from_buffer_copy(self._args), list[Tensor]()
        sides = zip((args.k, args.v), (k, v), sources, self._fields, strict=True)
        for side, x, source, fields in sides:
            side.x = exact_tokens(x, alive)
            if side.tokens and (where := source.where(fields[0][0])) is not None:
                table = where.address
                for name, behind in fields:
                    getattr(side, name).base = table + behind
        args.learn.threads = args.k.threads = torch.get_num_threads()
        learning, room = self._learning, None
        if learning is not None:
            args.learn.x = args.k.x
            room = learning.room(args.learn)
            args.k.trellis = args.learn.known
            if q is not None:
                args.learn.q = exact_tokens(q[:, :, self._first :], alive)
        status = self._library.prompt(self._library.bit, ctypes.byref(args))
        if status == NO_NUMBER:
            return None
        if status == 3:
            raise MemoryError("no memory for the scratch space of a prompt")
        if status:
            raise KernelError(f"the native kernel refused the prompt ({status}); nothing is stored")
        return self._codec if learning is None or room is None else learning.learnt(*room)


def _fill(
    args: ctypes.Structure, codec: Codec, side: int, shape: PromptShape
) -> list[tuple[str, int]]:
    """Write what stays; return the fields, and how far from the first one each has its table."""
    encoder, source = CodecEncoder.of(codec), shape.sources[side]
    made, x = EncodeArgs.from_buffer_copy(encoder.args), (shape.k, shape.v)[side]
    encoder.place(made, source)
    made.dtype, made.tokens, made.start = DTYPES[x.dtype], shape.packed[side], 0
    made.batch, made.heads = x.shape[:2]
    made.segment_tokens, made.sinks = source.segment_tokens, shape.sinks[side]
    ctypes.memmove(ctypes.addressof(args), ctypes.addressof(made), ctypes.sizeof(made))
    tables = [getattr(made, name).base or 0 for name in encoder.fields]
    return [(name, table - tables[0]) for name, table in zip(encoder.fields, tables, strict=True)]
