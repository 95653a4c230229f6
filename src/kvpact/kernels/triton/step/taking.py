"""The tokens of a step are taken in one launch: written down, checked, kept, encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.triton.columns import Side
from kvpact.kernels.triton.encode.encoder import encoded_alone, rows_of, span_of, warps_of
from kvpact.kernels.triton.encode.form import tables_of
from kvpact.kernels.triton.forms import Places, sent, width_of
from kvpact.kernels.triton.step.kernels import Taking, take_tokens
from kvpact.methods import Codec


class Taker(NamedTuple):
    """A stream that takes tokens. `codec`: that a kernel encodes for."""

    codec: Codec
    slots: Places
    taking: Taking


def taking_of(codec: Codec, x: Tensor, side: Side, wait: bool = False) -> Taking:
    """Return how a stream takes tokens like `x`, `[B, H, new, D]`.

    Tokens that `wait` are encoded by others when they leave the window.
    """
    form = tables_of(codec, x.device).form
    encodes = encoded_alone(codec) and form.trellis is None and not wait
    new = x.shape[2]
    rows = rows_of(form, new)
    span = span_of(form, new) if encodes else rows
    most, longest = codec.max_abs, codec.max_norm
    if wait and codec.group == 1:
        most = min(most, form.limit)
    return Taking(form, side, encodes, most, longest, rows, span, x.element_size())


Flag = tuple[int, bool, bool]
"""What `take` is told of a row, or of all of them: the address of a 0-d bool that becomes False
where a number of its tokens or queries can't be stored; whether K's tokens, and V's, are copied
behind the tail."""


def sent_flags(flags: Sequence[Flag], device: torch.device) -> Tensor:
    """Return flags on the device, `[len(flags), 3]` int64."""
    return sent(torch.tensor(flags, dtype=torch.int64, device="cpu"), device)


def take(
    table: Tensor, flags: Tensor, sides: Sequence[Taker], k: Tensor, v: Tensor, q: Tensor
) -> None:
    """Take the tokens of a step, behind those that each row holds: the device alone knows.

    Tokens of groups and of trellises are encoded by others.

    `table`: of `rows`; gets to know where the new tokens lie. `flags`: of `sent_flags`, one for
    each row or one for all. `k`, `v`, `q`: `[B, H_kv, new, D]`, `[B, H_kv, new, D_v]` and
    `[B, H_q, queries, D]`, their last axes without gaps.
    """
    batch, heads, new, _ = k.shape
    how = [side.taking for side in sides]
    spans = max((new + one.span - 2) // one.span + 1 for one in how)
    where: list[Tensor | int] = []
    for codec, slots, _ in sides:
        tables = tables_of(codec, k.device)
        where += [slots.table, slots.heads, tables.signs, tables.boundaries, tables.levels]
        where += [slots.tiles, slots.segments]
    strides = [step for x in (k, v, q) for step in x.stride()[:3]]
    take_tokens[spans, 3 * heads, batch](
        table, flags, flags.stride(0) if len(flags) > 1 else 0, k, v, q, *strides, *where,
        new, q.shape[2], heads, q.shape[1] // heads, batch,
        *how, q.shape[3], width_of(q.shape[3]),
        num_warps=max(warps_of(one.form, new) for one in how),
        maxnreg=255, enable_fp_fusion=False, num_stages=1,
    )  # fmt: skip
