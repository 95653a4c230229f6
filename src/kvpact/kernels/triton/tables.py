"""Levels and queries as the fast kernels have them: whole numbers, in bytes."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvpact.kernels.triton.forms import SlotForm, Slots, power_of_two, sent
from kvpact.kernels.triton.operands import channel_places, groups_of, key_width
from kvpact.kernels.triton.query_digits import query_digits
from kvpact.transforms import RandomHadamard
from kvpact.transforms.base import Transform
from kvpact.transforms.hadamard import random_signs

LOG2_E = 1.4426950408889634
LEAST_ROWS = 4
"""Query rows of a product, at least: two digits of each are its columns."""


def level_worth(form: SlotForm) -> float:
    """Return what a level that a kernel multiplies is worth: 4-bit numbers are 16 times larger."""
    return form.unit / 16 if form.bits == 4 and form.signed else form.unit


_tables: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def table_words(slots: Slots) -> Tensor:
    """Return the table of levels `[4, 4]` int32: four words, with a copy for each of four threads.

    Of numbers in two's complement, the first word has their top bits.
    """
    form, levels = slots.form, slots.levels
    assert form is not None and levels is not None
    found = _tables.get(levels)
    if found is None:
        if form.signed and form.bits in (4, 8):
            levels8 = torch.full((16,), -0x78 if form.bits == 4 else -0x80, dtype=torch.int8)
            levels8 = levels8.to(levels.device)
        else:
            levels8 = (levels / form.unit).round().to(torch.int8).repeat(16 >> form.bits)
        words = levels8.view(torch.int32).unsqueeze(1)
        found = _tables[levels] = words.expand(4, 4).contiguous()
    return found


def digits_of(
    q: Tensor, kv_heads: int, scale: float, transform: Transform, form: SlotForm, kw: int
) -> tuple[Tensor, Tensor]:
    """Return queries in two digits each, and what a digit is worth in logits of base 2.

    Parameters
    ----------
    q : Tensor
        `[B, H_q, q_len, D]`, the last axis without gaps.
    kv_heads : int
        KV heads.
    scale : float
        Factor on the logits.
    transform : Transform
        Of K.
    form : SlotForm
        K's.
    kw : int
        Bytes of k that stand side by side (`tuning.side_by_side`).

    Returns
    -------
    (Tensor, Tensor)
        int8 `[B, H_kv, groups, G, 2, width]` and fp32 `[B, H_kv, G]` with G rows, filled up; row
        `g * q_len + i` is query i of the head's group g.
    """
    batch, q_heads, queries, dim = q.shape
    rows = q_heads // kv_heads * queries
    count, size = max(power_of_two(rows), LEAST_ROWS), key_width(form)
    span = groups_of(form) * size
    digits = q.new_empty(batch, kv_heads, groups_of(form), count, 2, size, dtype=torch.int8)
    units = q.new_empty(batch, kv_heads, count, dtype=torch.float32)
    signs = units
    if isinstance(transform, RandomHadamard):
        signs = random_signs(dim + transform.block, transform.seed, q.device)
    query_digits[kv_heads, batch](
        q, signs, _places(form, count, kw, q.device), digits, units,
        q.stride(0), q.stride(1), q.stride(2), queries, rows, kv_heads,
        scale * level_worth(form) * LOG2_E,
        dim, power_of_two(max(dim, span)), count, size, span, signs is not units,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return digits, units


@cache  # a graph may hold the address
def _places(form: SlotForm, rows: int, kw: int, device: torch.device) -> Tensor:
    """Return `[span]` int32: where the high digit of each channel goes in row 0 of `digits`."""
    width: int = key_width(form)
    order = torch.tensor(channel_places(form, kw))
    place = torch.empty_like(order)
    place[order] = torch.arange(width)
    first: Tensor = torch.arange(groups_of(form)).unsqueeze(1) * (2 * rows * width)
    return sent((first + place).flatten().to(torch.int32), device)
