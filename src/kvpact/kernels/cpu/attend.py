"""Attention by the native kernel: what it covers, and its arguments.

The torch body in `attend` defines the result. Everything is checked here, before C++ is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.kernels.cpu import attend_rows as native_rows
from kvpact.kernels.cpu import structs
from kvpact.kernels.cpu.slots import DTYPES, MOST_DIM, slot_format
from kvpact.kernels.plan import Kernel
from kvpact.kernels.views import LayerView, StreamView
from kvpact.methods import Codec

MOST_GROUPS = 32
_F32 = torch.float32


class _Fixed(NamedTuple):
    """What of a stream's arguments stays while its slots stay where they are."""

    codec: Codec  # its `slot_format` lives as long, and has what the arguments point to
    dtype: torch.dtype
    data: bytes
    reason: str  # why no kernel attends over the slots; or nothing


def _fixed(view: StreamView) -> _Fixed:
    """Return a view's fixed arguments; they are kept beside what they point to."""
    found: _Fixed | None = view.source.prepared
    if found is None or found.codec is not view.codec or found.dtype is not view.tail.dtype:
        found = view.source.prepared = _fill(view)
    return found


def _fill(view: StreamView) -> _Fixed:
    form, dtype = slot_format(view.codec), view.tail.dtype
    stream = structs.Stream.from_buffer_copy(form.stream)
    stream.segment_tokens, stream.dtype = view.source.segment_tokens, DTYPES[dtype]
    reason, dim, channels = form.reason, stream.dim, stream.channels
    if not reason and channels < dim and (channels % 32 or -(-dim // channels) > MOST_GROUPS):
        reason = f"groups of {channels} channels"
    if not reason and not form.place(stream, view.source):
        reason = "slots with gaps in memory"
    return _Fixed(view.codec, dtype, bytes(stream)[: structs.FIXED_BYTES], reason)


def refusal(
    view: LayerView | None, k: Tensor | None, v: Tensor | None, q: Tensor, config: AttendConfig
) -> str:
    """Return why the native kernel does not cover a call; nothing if it does.

    Parameters
    ----------
    view : LayerView or None
        The tokens held.
    k, v : Tensor or None
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`, the new tokens.
    q : Tensor
        `[B, H_q, q_len, D]`.
    config : AttendConfig
        How to attend.
    """
    if view is None:
        return _refusal_of_new(k, v, q)
    if not (q.is_cpu and view.k.tail.is_cpu):
        return f"device {q.device}"
    if q.dtype not in DTYPES or view.k.tail.dtype not in DTYPES:
        return f"dtype {q.dtype}"
    return _fixed(view.k).reason or _fixed(view.v).reason


def _refusal_of_new(k: Tensor | None, v: Tensor | None, q: Tensor) -> str:
    """Return why the native kernel does not attend over new tokens without a past."""
    assert k is not None and v is not None
    for x in (q, k, v):
        if not x.is_cpu:
            return f"device {x.device}"
        if x.dtype not in DTYPES:
            return f"dtype {x.dtype}"
        if x.shape[3] > MOST_DIM:
            return f"width {x.shape[3]} is above {MOST_DIM}"
    return ""


def _new_stream(fresh: Tensor | None, alive: list[Tensor]) -> tuple[bytes, tuple[int, ...]]:
    """Return the arguments of a stream that holds nothing: new tokens only."""
    assert fresh is not None
    dim = fresh.shape[3]
    fixed = structs.Stream(
        kind=structs.RAW,
        bits=32,
        dim=dim,
        number=structs.F32,
        channels=dim,
        dtype=DTYPES[fresh.dtype],
        segment_tokens=1,
    )
    moving = (0, *_NO_TOKENS, *_exact(fresh, alive), *_NO_TOKENS, 0, 0)
    return bytes(fixed)[: structs.FIXED_BYTES], moving


def _exact(x: Tensor, alive: list[Tensor]) -> tuple[int, int, int, int]:
    row, head, token, channel = x.stride()
    if channel != 1 and x.shape[3] != 1:
        x = x.contiguous()
        alive.append(x)
        row, head, token, _ = x.stride()
    size = x.itemsize
    return x.data_ptr(), row * size, head * size, token * size


_NO_TOKENS = (0, 0, 0, 0)


def _stream(
    view: StreamView | None, fresh: Tensor | None, alive: list[Tensor]
) -> tuple[bytes, tuple[int, ...]]:
    """Return a stream's fixed arguments, and those that may change with each token."""
    if view is None:
        return _new_stream(fresh, alive)
    new, sinks, positions, count = _NO_TOKENS, _NO_TOKENS, 0, 0
    if fresh is not None:
        if fresh.dtype is not view.tail.dtype:
            fresh = fresh.to(view.tail.dtype)
            alive.append(fresh)
        new = _exact(fresh, alive)
    if view.sinks is not None and view.sink_positions is not None and view.exact_from:
        sinks = _exact(view.sinks, alive)
        placed = view.sink_positions.contiguous()
        alive.append(placed)
        positions, count = placed.data_ptr(), placed.shape[1]
    moving = (view.exact_from, *_exact(view.tail, alive), *new, *sinks, positions, count)
    return _fixed(view).data, moving


def _mask(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return bytes, or fp32 with -inf for what its dtype's lowest number hides."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8) if mask.stride(-1) == 1 else mask.to(torch.uint8)
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        mask = mask.to(torch.float32).masked_fill(hidden, -torch.inf)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask.expand(shape)


def new_output(*shape: int) -> Tensor:
    """Return memory for fp32 results; every number of it is written."""
    return torch.empty(shape)


def tokens_of(view: StreamView | None, new: Tensor | None) -> Tensor:
    """Return exact tokens `[B, H_kv, T, D]` of a call: held ones, or new ones without a past."""
    tokens = new if view is None else view.tail
    assert tokens is not None
    return tokens


class NativeCall(NamedTuple):
    """One sequence's arguments, and what they point to beside the view and the tokens."""

    args: bytes
    alive: list[Tensor]
    rows: int  # query rows of a KV head


def native_call(
    fast: bool,
    view: LayerView | None,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None,
    out: int,
) -> NativeCall:
    """Return the arguments of a call that `refusal` lets pass; parameters as of `attend`, checked.

    The view and the tokens have to stay as long as the arguments are used, and nobody may write to
    them. `out` is the address of `B * H_q * q_len * D_v` fp32 numbers.
    """
    batch, q_heads, queries, dim = q.shape
    held, new = 0 if view is None else view.length, 0 if k is None else k.shape[2]
    alive: list[Tensor] = []
    k_fixed, k_moving = _stream(view and view.k, k, alive)
    v_fixed, v_moving = _stream(view and view.v, v, alive)
    heads = tokens_of(view and view.k, k).shape[1]
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
        seen = _mask(config.mask.to("cpu"), (batch, q_heads, queries, held + new))
        alive.append(seen)
        mask, mask_float = seen.data_ptr(), seen.dtype is _F32
        mask_row, mask_head, mask_query = (step * seen.itemsize for step in seen.stride()[:3])
    address, q_row, q_head, q_token = _exact(q, alive)
    args = structs.CALL.pack(
        k_fixed,
        *k_moving,
        v_fixed,
        *v_moving,
        batch,
        heads,
        q_heads // heads,
        queries,
        held,
        new,
        held + new - queries,
        address,
        q_row,
        q_head,
        q_token,
        out,
        DTYPES[q.dtype],
        config.is_causal,
        config.sliding_window or 0,
        starts,
        rows,
        mask,
        mask_row,
        mask_head,
        mask_query,
        mask_float,
        fast,
        dim**-0.5 if config.softmax_scale is None else config.softmax_scale,
        config.softcap or 0.0,
        torch.get_num_threads(),
    )
    return NativeCall(args, alive, q_heads // heads * queries)


def run(kernel: Kernel, calls: Sequence[NativeCall], latent: bool = False) -> None:
    """Carry out calls, those with few query rows all at once; `latent`: of `attend_latent`.

    Raises
    ------
    MemoryError
        No memory for what the kernel needs beside.
    """
    status = native_rows.run(kernel, [(call.args, call.rows) for call in calls], latent)
    if status == 3:
        raise MemoryError("no memory for the scratch space of attention")
    assert status == 0, f"the native kernel refused the call ({status})"


def attend_native(
    kernel: Kernel,
    view: LayerView | None,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None,
    latent: bool = False,
) -> Tensor:
    """Compute `attend`, or `attend_latent`, for a call that `refusal` lets pass; all is checked."""
    batch, q_heads, queries, _ = q.shape
    values = tokens_of(view and view.k, k) if latent else tokens_of(view and view.v, v)
    out = new_output(batch, q_heads, queries, values.shape[3])
    call = native_call(kernel.fast, view, k, v, q, config, padding, out.data_ptr())
    run(kernel, (call,), latent)
    return out if q.dtype is _F32 else saturated(out, q.dtype)
