"""Which trellises the fast kernel for them attends, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton.digits_trellis import attend_trellises
from kvpact.kernels.triton.forms import SlotForm, power_of_two, sent
from kvpact.kernels.triton.query_digits import query_digits
from kvpact.kernels.triton.tables import LEAST_ROWS, LOG2_E
from kvpact.kernels.triton.trellis_levels import MOST_LEVELS
from kvpact.kernels.triton.trellis_queries import packed_queries
from kvpact.kernels.triton.trellis_steps import Steps
from kvpact.kernels.triton.tuning import Choice
from kvpact.methods.trellis_codec import steps
from kvpact.quantizers import trellis

MOST_WIDTH = 256


def trellis_choice(k: SlotForm, v: SlotForm) -> Choice:
    """Return how the kernel is launched: two tiles are a part of every group with a mean."""
    return Choice(2, 4 if max(k.dim, v.dim) <= 128 else 8, 1, 255)


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


def _byte_table(block: Steps) -> Tensor:
    """Return the level of each index, in the order of bits that `trellis_levels` makes."""
    low = block.low.width
    index = torch.arange(MOST_LEVELS) & ((2 << block.bits) - 1)
    point = (index >> 1 & (1 << (low - 1)) - 1) | index >> (low + 1) << (low - 1)
    levels = trellis.levels(block.bits, torch.device("cpu"))
    return levels[4 * point + 2 * (index & 1) + (index >> low & 1)].to(torch.int8)


@cache  # a graph may hold the address
def level_table(form: SlotForm, device: torch.device) -> Tensor:
    """Return the levels of each block's indices, four to a word: `[blocks, words]` int32."""
    return sent(torch.stack([_byte_table(block) for block in form.steps]).view(torch.int32), device)


@cache  # a graph may hold the address
def _channels(form: SlotForm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the place among K's codes of each channel, int32, and what a level is worth there."""
    assert form.trellis is not None
    place, unit = torch.arange(form.dim), torch.zeros(form.dim)
    for block in form.steps:
        part = slice(block.begin, block.begin + block.dim)
        order = steps(block.dim, block.bits, form.trellis.interleave, torch.device("cpu"))
        place[part], unit[part] = block.begin + order, block.unit
    return sent(place.to(torch.int32), device), sent(unit, device)


def attend_trellis(
    forms: tuple[SlotForm, SlotForm],
    splits: int,
    calls: Sequence[AttendCall],
    scale: float,
    table: Tensor,
    packed: Tensor,
    lse: Tensor,
    first_part: int,
    asm: bool,
) -> None:
    """Write parts as `attend_fast` does; `forms` are K's and V's, `asm`: as of `key_levels`."""
    (k, v), (batch, heads, parts, rows, _), device = forms, packed.shape, packed.device
    held = []
    for call in calls:
        assert call.view is not None
        x = (call.q.float() * scale).reshape(call.q.shape[0], heads, rows, k.dim)
        held.append((x, *packed_queries(call.view.k.codec, x)))
    exact = torch.cat([x for x, _, _ in held]).contiguous()
    none = exact.new_zeros(1, 1, 1).expand(batch, heads, rows)
    firsts = [none[: len(x)] if first is None else first for x, _, first in held]
    places, unit = _channels(k, device)
    q = torch.cat([treated for _, treated, _ in held]) * unit
    count = max(power_of_two(rows), LEAST_ROWS)
    digits = q.new_empty(batch, heads, count, 2, k.dim, dtype=torch.int8)
    units = q.new_empty(batch, heads, count)
    query_digits[heads, batch](
        q, units, places, digits, units, q.stride(0), q.stride(1), q.stride(2), rows, rows, heads,
        LOG2_E, k.dim, k.dim, count, k.dim, k.dim, False, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    config, chosen = calls[0].config, trellis_choice(k, v)
    attend_trellises[splits, heads, batch](
        table, digits, units, exact, torch.cat(firsts).contiguous(),
        level_table(k, device), level_table(v, device), packed, lse,
        heads, calls[0].q.shape[2], rows, first_part, parts, v.steps[0].unit,
        (config.softcap or 1.0) * LOG2_E, k, v, count, chosen.tiles, config.softcap is not None,
        asm, num_warps=chosen.warps, num_stages=chosen.stages, maxnreg=chosen.registers,
        enable_fp_fusion=True,
    )  # fmt: skip
