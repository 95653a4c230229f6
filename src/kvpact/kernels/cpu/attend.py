"""Attention by the native kernels: which of them takes a call, and its checked arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.errors import CorruptState, KernelError
from kvpact.kernels.base import AttendCall
from kvpact.kernels.cpu import structs
from kvpact.kernels.cpu.library import NativeLibrary
from kvpact.kernels.cpu.offset import NO_OFFSET, native_offset
from kvpact.kernels.cpu.slots import DTYPES, SlotFormat, exact_tokens
from kvpact.kernels.offset import RowOffset
from kvpact.kernels.torch.logits import mask_numbers
from kvpact.kernels.views import StreamView
from kvpact.methods import Codec

NAME = "cpu"
_F32 = torch.float32


class _Fixed(NamedTuple):
    """The arguments of a stream that stay while its slots stay where they are."""

    codec: Codec  # its `SlotFormat` lives as long, and has what the arguments point to
    learnt: bool  # unless the codec has learnt since
    dtype: torch.dtype
    data: bytes


def fixed_arguments(view: StreamView) -> bytes:
    """Return a view's fixed arguments; they are kept with what they point to."""
    found: _Fixed | None = view.source.prepared.get(NAME)
    codec, dtype = view.codec, view.tail.dtype
    if (
        found is None
        or found.codec is not codec
        or found.dtype is not dtype
        or (not found.learnt and codec.ready)
    ):
        form = SlotFormat.of(codec)
        stream = structs.StreamStruct.from_buffer_copy(form.args)
        stream.segment_tokens, stream.dtype = view.source.segment_tokens, DTYPES[dtype]
        form.place(stream, view.source)
        data = bytes(stream)[: structs.FIXED_BYTES]
        found = view.source.prepared[NAME] = _Fixed(codec, form.learnt, dtype, data)
    return found.data


_NO_TOKENS = (0, 0, 0, 0)


def _new_stream(fresh: Tensor, exact: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    """Return the arguments of a stream of new tokens only, which lie at `exact`."""
    moving = (0, *_NO_TOKENS, *exact, *_NO_TOKENS, 0, 0, *NO_OFFSET)
    return _raw_arguments(fresh.shape[3], fresh.dtype), moving


@lru_cache(maxsize=64)
def _raw_arguments(dim: int, dtype: torch.dtype) -> bytes:
    """Return the fixed arguments of a stream whose tokens are all exact."""
    raw, number = structs.KINDS["raw"], structs.F32
    fixed = structs.StreamStruct(
        kind=raw, bits=32, dim=dim, number=number, channels=dim, dtype=DTYPES[dtype]
    )
    fixed.segment_tokens = 1
    return bytes(fixed)[: structs.FIXED_BYTES]


def _stream(
    view: StreamView, fresh: Tensor | None, alive: list[Tensor]
) -> tuple[bytes, tuple[int, ...]]:
    """Return a stream's fixed arguments, and those that may change with each token."""
    new, sinks, positions, count, offset = _NO_TOKENS, _NO_TOKENS, 0, 0, NO_OFFSET
    if isinstance(view.offset, RowOffset):  # no codec with a rotation is covered
        known = native_offset(view.offset, view.length)
        offset = known.args
        alive += known.alive
    if fresh is not None:
        if fresh.dtype is not view.tail.dtype:
            fresh = fresh.to(view.tail.dtype)
            alive.append(fresh)
        new = exact_tokens(fresh, alive)
    if view.sinks is not None and view.sink_positions is not None:
        sinks = exact_tokens(view.sinks, alive)
        placed = view.sink_positions.contiguous()
        alive.append(placed)
        positions, count = placed.data_ptr(), placed.shape[1]
    moving = (view.exact_from, *exact_tokens(view.tail, alive), *new, *sinks, positions, count)
    return fixed_arguments(view), moving + offset


def new_output(*shape: int) -> Tensor:
    """Return memory for fp32 results; every number of it is written."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class NativeCall(NamedTuple):
    """One call's arguments, and what they point to besides the view and the tokens."""

    args: bytes
    alive: list[Tensor]
    query_rows: int  # of a KV head


def native_call(
    call: AttendCall, out: int, by_token: bool = False, exact: Sequence[tuple[int, ...]] = ()
) -> NativeCall:
    """Return the arguments of a checked call, with `out`, the address of its fp32 output.

    `by_token`: that is `[B, queries, H_q, D_v]`; `exact`: where K, V and Q lie, if that is known.

    The view and the tokens have to stay while these are used. Raises `CorruptState`.
    """
    view, k, v, q, config, padding, _ = call
    batch, q_heads, queries, _ = q.shape
    held, new = 0 if view is None else view.length, 0 if k is None else k.shape[2]
    heads = (view.k.tail if k is None and view is not None else k).shape[1]  # type: ignore[union-attr]
    if view is not None and view.v.length != held:
        raise CorruptState(f"K holds {held} tokens and V {view.v.length}; reset this layer")
    alive: list[Tensor] = []
    if view is None:
        assert k is not None and v is not None
        exact = exact or [exact_tokens(x, alive) for x in (k, v, q)]
        k_fixed, k_moving = _new_stream(k, exact[0])
        v_fixed, v_moving = _new_stream(v, exact[1])
    else:
        k_fixed, k_moving = _stream(view.k, k, alive)
        v_fixed, v_moving = _stream(view.v, v, alive)
    rows = starts = mask = mask_row = mask_head = mask_query = mask_float = 0
    if padding is not None:
        padding = padding.to("cpu", torch.int64).contiguous()
        alive.append(padding)
        starts = padding.data_ptr()
    if config.sink_logits is not None:
        sink_logits = config.sink_logits.detach().to("cpu", _F32).contiguous()
        alive.append(sink_logits)
        rows = sink_logits.data_ptr()
    if config.mask is not None:
        seen = mask_numbers(config.mask.to("cpu"))
        seen = seen if seen.stride(-1) == 1 else seen.contiguous()
        seen = seen.expand(batch, q_heads, queries, held + new)
        alive.append(seen)
        mask, mask_float = seen.data_ptr(), seen.dtype is _F32
        mask_row, mask_head, mask_query = (step * seen.itemsize for step in seen.stride()[:3])
    address, q_row, q_head, q_token = exact[2] if exact else exact_tokens(q, alive)
    args = structs.CALL.pack(
        k_fixed, *k_moving, v_fixed, *v_moving,
        batch, heads, q_heads // heads, queries, held, new, held + new - queries,
        address, q_row, q_head, q_token, out, DTYPES[q.dtype],
        config.is_causal, config.sliding_window or 0, starts, rows,
        mask, mask_row, mask_head, mask_query, mask_float, by_token,
        call.scale, config.softcap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return NativeCall(args, alive, q_heads // heads * queries)


MANY_ROWS = 32
"""Query rows of a KV head from which the kernel for many rows takes a call.

The kernel for few rows reads the slots once for up to eight rows; the one for many decodes a block
of tokens once and multiplies matrices, for chunks of a prompt, speculative checks and latents.
"""
MANY_WHOLE = {"avx2": 64, "avx512": 1 << 62, "avx512vbmi": 1 << 62}
"""The same where levels are multiplied as whole numbers, by level, for calls whose queries are not
more than an eighth of the tokens held: new tokens are exact, and there the kernel for many is the
quicker one (`benchmarks/rows.py`)."""


def many_rows(library: NativeLibrary, call: AttendCall) -> int:
    """Return from how many query rows of a KV head the kernel for many rows takes this call."""
    if call.latent:
        return 1
    view = call.view
    if view is None or view.length < 8 * call.q.shape[2]:
        return MANY_ROWS
    whole = SlotFormat.of(view.k.codec).whole and SlotFormat.of(view.v.codec).whole
    return MANY_WHOLE.get(library.level, MANY_ROWS) if whole else MANY_ROWS


def attend_native(
    library: NativeLibrary, calls: Sequence[AttendCall], exact: Sequence[tuple[int, ...]] = ()
) -> Tensor:
    """Attend natively; parameters as of `Backend.attend`. Raises `MemoryError`.

    `exact`: where K, V and Q of a single call over new tokens alone lie, if that is known.
    """
    first = calls[0]
    _, q_heads, queries, _ = first.q.shape
    rows = first.q.shape[0] if len(calls) == 1 else sum(call.q.shape[0] for call in calls)
    # Models want the tokens of prompts in a row, with all heads of each.
    by_token = queries > 1
    inner = (queries, q_heads) if by_token else (q_heads, queries)
    out = new_output(rows, *inner, first.output_dim)
    place, size = out.data_ptr(), out.stride(0) * out.itemsize
    few: list[NativeCall] = []
    many: list[NativeCall] = []
    for call in calls:
        native = native_call(call, place, by_token, exact)
        (many if native.query_rows >= many_rows(library, call) else few).append(native)
        place += size * call.q.shape[0]
    status = 0
    if few:
        status = library.attend(library.bit, b"".join(native.args for native in few), len(few))
    for native in many:
        status = status or library.attend_rows(library.bit, native.args, first.latent)
    if status == 3:
        raise MemoryError("no memory for the scratch space of attention")
    if status:
        raise KernelError(f"the native kernel refused the call ({status})")
    out = out if first.q.dtype is _F32 else saturated(out, first.q.dtype)
    return out.transpose(1, 2) if by_token else out
