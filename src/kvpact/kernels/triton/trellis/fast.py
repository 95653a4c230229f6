"""The fast kernel for trellises: those that it attends, its launch, and their queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton.digits.levels import query_digits
from kvpact.kernels.triton.digits.tables import LEAST_ROWS, LOG2_E, Queries
from kvpact.kernels.triton.forms import SlotForm, power_of_two
from kvpact.kernels.triton.trellis.keys import key_places
from kvpact.kernels.triton.trellis.levels import CONSTANTS
from kvpact.kernels.triton.trellis.queries import packed_queries
from kvpact.kernels.triton.trellis.steps import TrellisSteps
from kvpact.kernels.triton.tuning import Choice
from kvpact.quantizers import trellis

MOST_WIDTH = 256


def trellis_choice(k: SlotForm, v: SlotForm, rows: int) -> Choice:
    """Return how the kernel is launched; a block is part of one group of tokens with a mean.

    Products of four warps would be others on sm_100, for which operands have no layout. So more
    than 8 query rows spill some registers, and so do 6 bits, and wide V of 3 bits.
    """
    wide = max(k.dim, v.dim) > 128
    if wide and v.bits > 3:
        return Choice(1, 2, 3, 255)
    if v.bits > 4:
        return Choice(1, 1 if v.bits == 5 and rows <= 4 else 2, 3, 255)
    warps = 2 if wide or rows > 8 or (rows > 4 and k.has("base")) else 1
    return Choice(2, warps, 5, 255)


def trellis_reason(form: SlotForm, order: str) -> str:
    """Return why the kernel does not attend over a trellis; "" if it does."""
    if form.kind != "trellis" or form.order != order:
        return "no trellis"
    least = 16 if order == "token" else 32
    if form.dim != form.padded or not least <= form.dim <= MOST_WIDTH:
        return f"trellises of {form.dim} channels"
    for block in form.steps:
        narrow = block.dim & (block.dim - 1) or block.dim < least
        if narrow or (order == "token" and not block.words):
            return f"trellises of {block.dim} channels"
    return ""


def _levels(block: TrellisSteps) -> Tensor:
    """Return the level of each index, in the order of bits that `levels8` looks up."""
    index, bits = torch.arange(2 << block.bits, dtype=torch.int64, device="cpu"), block.bits
    if bits <= 3:
        second, point = index >> min(bits, 2) & 1, (index >> 1 & 1) | index >> 3 << 1
    else:
        second, point = index >> 3 & 1, (index >> 1 & 3) | index >> 4 << 2
    if bits == 1:
        point = torch.zeros_like(index)
    levels = trellis.levels(bits, torch.device("cpu"))
    return levels[4 * point + 2 * (index & 1) + second].to(torch.int8)


@cache  # a graph may hold the address
def level_table(form: SlotForm, device: torch.device) -> Tensor:
    """Return constants and each block's levels, `[rows, 4]` int32: a copy for each thread."""
    words = torch.cat([_levels(block) for block in form.steps]).view(torch.int32)
    constants = torch.tensor(CONSTANTS, dtype=torch.int32, device="cpu")
    # The host waits, here and below: other streams may be the next to ask for it.
    return torch.cat([constants, words.unsqueeze(1).expand(-1, 4)]).contiguous().to(device)


@cache  # a graph may hold the address
def _channels(form: SlotForm, kw: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return channels' places in K's operands, then empty ones; and what levels are worth."""
    places = [x for i in range(len(form.steps)) for x in key_places(form, i, kw)]
    order = torch.tensor(places, dtype=torch.int64, device="cpu")
    every = torch.arange(len(order), dtype=torch.int32, device="cpu")
    empty, place = every[order < 0], torch.empty_like(every)
    unit = torch.zeros(form.dim, dtype=torch.float32, device="cpu")
    place[order[order >= 0]] = every[order >= 0]
    place[len(order) - len(empty) :] = empty
    for block in form.steps:
        unit[block.begin : block.begin + block.dim] = block.unit
    return place.to(device), unit.to(device)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return calls' rows in one tensor without gaps."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def treated_queries(calls: Sequence[AttendCall], form: SlotForm, scale: float, kw: int) -> Queries:
    """Return the queries of calls in two digits each, treated as K's slots are, and themselves."""
    heads, held = calls[0].kv_heads, []
    for call in calls:
        assert call.view is not None
        x = (call.q.float() * scale).reshape(call.q.shape[0], heads, -1, form.dim)
        held.append((x, *packed_queries(call.view.k.codec, x)))
    places, unit = _channels(form, kw, calls[0].q.device)
    q = _joined([treated for _, treated, _ in held]) * unit
    batch, _, rows, _ = q.shape
    count, width = max(power_of_two(rows), LEAST_ROWS), len(places)
    digits = q.new_empty(batch, heads, 1, count, 2, width, dtype=torch.int8)
    units = q.new_empty(batch, heads, count)
    query_digits[heads, batch](
        q, units, places, digits, units, *q.stride()[:3], rows, rows, heads,
        LOG2_E, form.dim, power_of_two(width), count, width, width, False, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    if not form.has("base"):
        return Queries(digits, units)
    firsts = [x.new_zeros(x.shape[:3]) if first is None else first for x, _, first in held]
    return Queries(digits, units, _joined([x for x, _, _ in held]), _joined(firsts))
