"""Levels and queries as the fast kernels have them: whole numbers, in bytes."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvpact.kernels.triton.digits.levels import query_digits
from kvpact.kernels.triton.digits.operands import channel_places, key_width, level_worth
from kvpact.kernels.triton.forms import SlotForm, Slots, power_of_two

LOG2_E = 1.4426950408889634
LEAST_ROWS = 4  # query rows of a product, at least: two digits of each are its columns


@cache
def whole_levels(form: SlotForm) -> SlotForm:
    """Return a form with whole levels, if there is one: codes of grids with a zero."""
    halves = form.kind == "table" and form.middle
    return replace(form, from_zero=True) if halves else form


def whole_slots(slots: Slots) -> Slots:
    """Return the same with a form from `whole_levels`."""
    return slots if slots.form is None else slots._replace(form=whole_levels(slots.form))


_tables: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def table_words(slots: Slots) -> Tensor:
    """Return levels `[4, 4]` int32: four words, for each of four threads; signed ones' top bits."""
    form, levels = slots.form, slots.levels
    assert form is not None
    found = _tables.get(levels)
    if found is None:
        if form.kind == "linear" and not form.signed:
            levels8 = torch.arange(1 << form.bits, dtype=torch.int64, device=levels.device)
            levels8 = levels8.to(torch.int8).repeat(16 >> form.bits)
        elif form.signed and form.bits in (4, 8):
            lowest = -0x78 if form.bits == 4 else -0x80
            levels8 = levels.new_full((16,), lowest, dtype=torch.int8)
        else:
            levels8 = (levels / form.unit).round().to(torch.int8).repeat(16 >> form.bits)
        words = levels8.view(torch.int32).unsqueeze(1)
        found = _tables[levels] = words.expand(4, 4).contiguous()
    return found


class Queries(NamedTuple):
    """Queries as `digits.attend_digits` takes them, G rows, filled up: row `g * q_len + i`."""

    digits: Tensor  # int8 `[B, H_kv, groups, G, 2, width]`, two digits of each number
    units: Tensor  # fp32 `[B, H_kv, G]`, what a digit is worth in logits of base 2
    numbers: Tensor | None = None  # fp32 `[B, H_kv, G, D]` in such logits; a trellis': rows, scaled
    firsts: Tensor | None = None  # fp32 `[B, H_kv, rows]`, products with a first key that is a base


def queries_of(q: Tensor, kv_heads: int, scale: float, slots: Slots, kw: int) -> Queries:
    """Return queries `[B, H_q, q_len, D]` without gaps in two digits each, and themselves."""
    form, (batch, q_heads, queries, dim) = slots.form, q.shape
    assert form is not None
    rows = q_heads // kv_heads * queries
    count, size = max(power_of_two(rows), LEAST_ROWS), key_width(form)
    span = form.groups * size
    digits = q.new_empty(batch, kv_heads, form.groups, count, 2, size, dtype=torch.int8)
    units = q.new_empty(batch, kv_heads, count, dtype=torch.float32)
    numbers = None
    if form.has("shift") or form.has("zero"):
        numbers = q.new_empty(batch, kv_heads, count, dim, dtype=torch.float32)
    query_digits[kv_heads, batch](
        q, slots.signs, _places(form, count, kw, q.device), digits, units,
        q.stride(0), q.stride(1), q.stride(2), queries, rows, kv_heads,
        scale * level_worth(form) * LOG2_E,
        dim, power_of_two(max(dim, span)), count, size, span, form.rotates, numbers, scale * LOG2_E,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return Queries(digits, units, numbers)


@cache  # a graph may hold the address
def _places(form: SlotForm, rows: int, kw: int, device: torch.device) -> Tensor:
    """Return `[span]` int32: where the high digit of each channel goes in row 0 of `digits`."""
    width: int = key_width(form)
    order = torch.tensor(channel_places(form, kw), dtype=torch.int64, device="cpu")
    place = torch.empty_like(order)
    place[order] = torch.arange(width, dtype=torch.int64, device="cpu")
    groups = torch.arange(form.groups, dtype=torch.int64, device="cpu")
    first = groups.unsqueeze(1) * (2 * rows * width)
    # The host waits: other streams may be the next to ask for it.
    return (first + place).flatten().to(torch.int32).to(device)
