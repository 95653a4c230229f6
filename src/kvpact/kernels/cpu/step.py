"""A layer's step in one native call: check, attend, encode and keep, with arguments made once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.errors import KernelError
from kvpact.kernels.base import QKV, AttendCall, StepRow, StepRunner, StepTokens, can_step
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import structs
from kvpact.kernels.cpu.encode import CodecEncoder, placed
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.offset import largest, native_offset
from kvpact.kernels.cpu.slots import exact_tokens
from kvpact.kernels.offset import RowOffset
from kvpact.kernels.views import LayerView, StreamView

_F32 = torch.float32
_FEW, _MANY, _LATENT = range(3)
_REFUSED = 4
_LARGEST = torch.finfo(_F32).max


def covers(call: AttendCall) -> bool:
    """Return whether steps like this call can be carried out in one native call each."""
    if not can_step(call) or not call.q.is_cpu:
        return False
    assert call.view is not None
    return _storable(call.view.k) and _storable(call.view.v)


def _storable(side: StreamView) -> bool:
    codec = side.codec
    encoder = CodecEncoder.of(codec)
    if encoder.reason:
        return False
    # Tokens that waited were not compared with this limit when they came.
    return codec.group == 1 or encoder.limit >= min(codec.max_abs, codec.max_norm)


def _nothing() -> None:
    """Stand for a plan in a pickle: addresses mean nothing elsewhere."""


class CpuStep(StepRunner):
    """Per-layer constants of repeated decode steps like `call`: shapes, rules, slot addresses."""

    def __init__(self, library: NativeLibrary, call: AttendCall) -> None:
        assert call.view is not None and call.k is not None and call.v is not None
        super().__init__(call)
        self._library, self._out = library, (*call.q.shape[:3], call.output_dim)
        # Tables only grow: the one that the arguments point to reaches as far.
        offset = call.view.k.offset
        self._most = None
        if isinstance(offset, RowOffset):
            self._most = native_offset(offset, call.view.length).most
        made = native.native_call(call, 0)
        # What the arguments point to: where sink tokens stand, logits of sinks, offsets.
        memory = [x.untyped_storage() for x in made.alive]
        self._alive: Any = (memory, call.view.k.codec, call.view.v.codec, call.padding)
        self._sinks: Any = (call.view.k.sinks, call.view.v.sinks)
        args = self._args = structs.StepStruct()
        ctypes.memmove(ctypes.byref(args.attend), made.args, len(made.args))
        _fill(args.k, call.view.k)
        _fill(args.v, call.view.v)
        many = made.query_rows >= native.many_rows(library, call)
        args.kernel = _LATENT if call.latent else _MANY if many else _FEW
        self._new = args.k.kept = args.v.kept = call.new
        self._address = ctypes.addressof(args)

    def over(self, view: LayerView) -> CpuStep | None:
        """Return one for another layer: of the arguments, where its slots and sinks lie differs."""
        if view.padding is not None or self._most is not None or view.k.offset is not None:
            return None
        if self.config.sink_logits is not None:
            return None  # they may lie in a copy, which the other one alone keeps
        other = object.__new__(CpuStep)
        other.__dict__.update(self.__dict__)
        other.sources = view.k.source, view.v.source
        memory: list[Any] = []
        other._alive = (memory, view.k.codec, view.v.codec)
        other._sinks = (view.k.sinks, view.v.sinks)
        args = other._args = structs.StepStruct.from_buffer_copy(self._args)
        other._address = ctypes.addressof(args)
        for side, stream, store in (
            (view.k, args.attend.k, args.k),
            (view.v, args.attend.v, args.v),
        ):
            fixed = native.fixed_arguments(side)
            ctypes.memmove(ctypes.addressof(stream), fixed, len(fixed))
            stream.sinks, stream.sink_positions, stream.n_sinks = structs.ExactStruct(), 0, 0
            if side.sinks is not None and side.sink_positions is not None:
                alive = [side.sinks]
                stream.sinks = exact_tokens(side.sinks, alive)
                memory.append(alive[-1].untyped_storage())
                stream.sink_positions = side.sink_positions.data_ptr()
                stream.n_sinks = side.sink_positions.shape[1]
                memory.append(side.sink_positions.untyped_storage())
            store.form = placed(side.codec, CodecEncoder.of(side.codec), side.source)
            store.form.segment_tokens = side.source.segment_tokens
        return other

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave nothing in a pickle."""
        return _nothing, ()

    def run(self, rows: Sequence[StepRow], k: Tensor, v: Tensor, q: Tensor) -> Tensor | None:
        """Check, attend, encode and keep new tokens: all of them, or none; see `StepRunner`."""
        out = native.new_output(len(rows) * self._out[0], *self._out[1:])
        k_at, v_at, q_at, out_at = k.data_ptr(), v.data_ptr(), q.data_ptr(), out.data_ptr()
        k_row = v_row = q_row = out_row = 0
        if len(rows) > 1:  # one is the rule, in every layer of every step
            k_row, v_row, q_row, out_row = (x.stride(0) * x.itemsize for x in (k, v, q, out))
        threads, args = torch.get_num_threads(), []
        for runner, held, k_tokens, v_tokens in rows:
            assert isinstance(runner, CpuStep)
            if runner._most is not None and held + k.shape[2] > runner._most:
                return None
            stored = (*_append(k_tokens, held, k_at), *_append(v_tokens, held, v_at))
            rest = q_at, out_at, 0, 0, 0, held, threads
            args.append(structs.STEP.pack(runner._address, *stored, *rest))
            k_at, v_at, q_at, out_at = k_at + k_row, v_at + v_row, q_at + q_row, out_at + out_row
        library = self._library
        if status := library.step(library.bit, b"".join(args), len(args)):
            raise_unless_refused(status)
            return None
        return out if q.dtype is _F32 else saturated(out, q.dtype)

    def first(self, at: slice, k: StepTokens, v: StepTokens, qkv: QKV, out: Tensor) -> bool:
        """Do as `run` with one row without a past, of any length; see `StepRunner`."""
        count, args = at.stop - at.start, self._args
        if out.dtype is not qkv[0].dtype or out.stride(2) != 1:
            return False
        if count != self._new:
            attend = args.attend
            self._new = attend.queries = attend.fresh = count
            if args.kernel != _LATENT:
                args.kernel = _MANY if attend.groups * count >= native.MANY_ROWS else _FEW
        args.k.kept, args.v.kept = count - k.memory.start, count - v.memory.start
        q_at, k_at, v_at, out_at = (
            x.data_ptr() + at.start * x.stride(0) * x.itemsize for x in (*qkv, out)
        )
        token, head, _ = out.stride()
        rounded = out_at, head * out.itemsize, token * out.itemsize
        stored = (self._address, *_append(k, 0, k_at), *_append(v, 0, v_at))
        rest = q_at, 0, *rounded, 0, torch.get_num_threads()
        library, step = self._library, structs.STEP.pack(*stored, *rest)
        status = library.step(library.bit, step, 1)
        if status:
            raise_unless_refused(status)
        return not status


def raise_unless_refused(status: int) -> None:
    """Raise what ended steps; return where one was refused, and nothing is written."""
    if status == _REFUSED:
        return
    if status == 3:
        raise MemoryError("no memory for the scratch space of a step")
    raise KernelError(f"the native kernel refused the step ({status})")


def _append(tokens: StepTokens, held: int, new: int) -> tuple[int, ...]:
    exact_from, memory, keep, start, encoded, inside = tokens
    origin, token = memory.origin, memory.token
    return (
        exact_from,
        origin + exact_from * token,
        memory.row,
        memory.head,
        token,
        new,
        origin + held * token if keep else 0,
        start,
        encoded,
        origin + start * token if inside else 0,
    )


def _fill(store: ctypes.Structure, side: StreamView) -> None:
    codec, encoder, dim = side.codec, CodecEncoder.of(side.codec), side.tail.shape[3]
    store.limit = min(codec.max_abs, codec.max_norm / math.sqrt(dim), encoder.limit, _LARGEST)
    if isinstance(side.offset, RowOffset):
        store.limit -= largest(side.offset)  # what is encoded may be that much larger
    store.form = placed(codec, encoder, side.source)
    store.form.segment_tokens = side.source.segment_tokens
