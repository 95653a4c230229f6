"""Attention by the kernels: calls of one kind become one launch, and its arguments."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable
from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton.attend.general import Variant, attend_general
from kvpact.kernels.triton.attend.merge import merge_parts
from kvpact.kernels.triton.attend.prompt import (
    PromptTokens,
    attend_new,
    attend_prompt,
    is_chunk,
    is_plain_prompt,
)
from kvpact.kernels.triton.attend.queries import query_rows, signs_of, treated
from kvpact.kernels.triton.attend.rows import UNBOUNDED, Rows, rows_of
from kvpact.kernels.triton.attend.streams import StreamForm
from kvpact.kernels.triton.columns import K_SIDE, V_SIDE
from kvpact.kernels.triton.digits.fast import Fast, attend_fast, fast_of, fast_range
from kvpact.kernels.triton.forms import NUMBERS, Slots, power_of_two, slots_of, width_of
from kvpact.kernels.triton.step.kernels import Counting
from kvpact.kernels.triton.tuning import general_choice, parts_of
from kvpact.methods import Codec

MOST_ROWS, MOST_NUMBERS = 64, 8192
"""Query rows of a program, and numbers of each of their sums, at most (of fp32, half of them)."""
LEAST_ROWS = 16  # rows of the smallest product that tensor cores compute
NARROW = 128  # channels up to which one warp merges a row of queries, and four merge `LEAST_ROWS`


def attend_triton(calls: Sequence[AttendCall]) -> Tensor:
    """Attend; parameters as of `Backend.attend`."""
    first = calls[0]
    if first.q.is_cuda and len(calls) == 1 and is_plain_prompt(first):
        return attend_prompt(first)
    batch = sum(call.q.shape[0] for call in calls)
    heads, queries = first.q.shape[1:3]
    out = first.q.new_empty(batch, heads, queries, first.output_dim)
    # With each call, where its first row stands in the output.
    groups: dict[Hashable, list[tuple[AttendCall, int]]] = {}
    done = 0
    for call in calls:
        groups.setdefault(_key(call), []).append((call, done))
        done += call.q.shape[0]
    for some in groups.values():
        together = [call for call, _ in some]
        attend_prepared(prepared(together, [first for _, first in some]), together, out)
    return out


def _codecs(call: AttendCall) -> tuple[Codec | None, Codec | None]:
    view = call.view
    return (None, None) if view is None else (view.k.codec, view.v.codec)


def _slots(call: AttendCall) -> tuple[Slots | None, Slots | None]:
    """Return the kernels' slots of the codecs of K and of V."""
    made: list[Slots | None] = []
    for codec in _codecs(call):
        slots = None if codec is None else slots_of(codec, call.q.device)
        reason = "" if slots is None else slots.reason
        if call.latent and treated(call):
            reason = "latents whose trellis is treated as keys are"
        if reason:
            raise BackendUnavailable(f"backend 'triton' can't attend: {reason}; use 'auto'")
        made.append(slots)
    return made[0], made[1]


def _dtypes(call: AttendCall) -> tuple[torch.dtype, torch.dtype]:
    """Return in which dtypes exact tokens of K and of V are read."""
    made = []
    for side in "kv":
        fresh: Tensor | None = getattr(call, side)
        found = None if call.view is None else getattr(call.view, side).tail.dtype
        if fresh is not None:
            found = fresh.dtype if found is None else torch.promote_types(found, fresh.dtype)
        assert found is not None, "a call needs new tokens or a view"
        made.append(found)
    return made[0], made[1]


def _mask_type(call: AttendCall) -> str:
    mask = call.config.mask
    return "" if mask is None else "u8" if mask.dtype == torch.bool else "fp32"


def _key(call: AttendCall) -> Hashable:
    """Return the key that calls of one launch share."""
    forms = tuple(
        codec and (slots and slots.form, codec.transform)
        for codec, slots in zip(_codecs(call), _slots(call), strict=True)
    )
    rules = call.scale, call.config.softcap, _mask_type(call), is_chunk(call)
    return forms, _dtypes(call), call.kv_heads, call.output_dim, rules, call.latent


def _aligned(rows: Rows) -> bool:
    """Return whether exact tokens can be read 16 bytes at a time."""
    steps = (x.stride(axis) * x.itemsize for x in rows.exact for axis in range(3))
    return all(step % 16 == 0 for step in (*steps, *(x.data_ptr() for x in rows.exact)))


def merge_warps(rows: int, width: int) -> int:
    """Return the warps that merge so many rows of queries at a time without spilling registers."""
    if rows == 1:
        return 1 if width <= NARROW else 4 if width <= 4 * NARROW else 8
    return 4 if width <= NARROW else 8


def merged_at_once(count: int, width: int) -> tuple[int, int]:
    """Return query rows that a program merges, and parts at a time, of which few rows have many."""
    if count < LEAST_ROWS:
        return 1, 16
    return LEAST_ROWS * 2 * NARROW // max(width, 2 * NARROW), 1


def variant_of(call: AttendCall, rows: Rows) -> Variant:
    """Return the variant that the kernel is compiled for."""
    dtypes, aligned = _dtypes(call), _aligned(rows)
    thrice = torch.float32 in (*dtypes, call.q.dtype)
    rope = call.q.shape[3] - call.output_dim
    dims = (call.output_dim, rope) if call.latent else (call.q.shape[3], call.output_dim)
    widest = max(width_of(dim) for dim in dims)
    most = max(MOST_NUMBERS // (2 if thrice else 1) // widest, LEAST_ROWS)
    held = min(max(power_of_two(call.query_rows), LEAST_ROWS), MOST_ROWS, most)
    choice = general_choice(held, widest, thrice)
    k, v = (
        StreamForm(
            slots and slots.form,
            dim,
            width_of(dim),
            NUMBERS[dtype],
            aligned,
            side,
            thrice,
            min(width_of(dim), choice.keys),
            min(width_of(dim), choice.values),
        )
        for slots, dim, dtype, side in zip(
            _slots(call), dims, dtypes, (K_SIDE, V_SIDE), strict=True
        )
    )
    softcap, mask = call.config.softcap is not None, _mask_type(call)
    return Variant(k, v, call.latent, held, softcap, mask, choice.warps)


def _most_tokens(calls: Sequence[AttendCall], skipped: Sequence[tuple[int | Tensor, int]]) -> int:
    """Return the tokens of the longest row, less those that are skipped in all rows of its call."""
    most = 0
    for call, (begin, end) in zip(calls, skipped, strict=True):
        total, left = call.held + call.new, 0 if isinstance(begin, Tensor) else max(begin, 0)
        most = max(most, total - max(min(end, total) - left, 0))
    return most


class Prepared(NamedTuple):
    """The constants of calls of one kind."""

    rows: Rows
    variant: Variant  # of the general kernel
    fast: Fast | None
    splits: int  # its parts
    chunk: bool  # new tokens are attended apart from the past


def prepared(calls: Sequence[AttendCall], first: Sequence[int]) -> Prepared:
    """Return the arguments known before calls of one kind are launched; `first` as in `rows_of`."""
    call, slots = calls[0], _slots(calls[0])
    chunk = is_chunk(call)
    fast = None if chunk else fast_of(calls, *slots)
    skipped: list[tuple[int | Tensor, int]]
    if chunk:
        skipped = [(each.held, UNBOUNDED) for each in calls]
    else:
        skipped = [(0, 0) if fast is None else fast_range(each) for each in calls]
    rows = rows_of(calls, slots, _dtypes(call), call.q.device, first, skipped)
    variant = variant_of(call, rows)
    row_tiles = -(-call.query_rows // variant.rows)
    programs = sum(each.q.shape[0] for each in calls) * call.kv_heads * row_tiles
    parts = parts_of(_most_tokens(calls, skipped), programs, call.q.device)
    return Prepared(rows, variant, fast, parts, chunk)


def attend_prepared(
    known: Prepared, calls: Sequence[AttendCall], out: Tensor, counting: Counting | None = None
) -> None:
    """Attend into `[rows, H_q, q_len, D_v]`; `counting`: what the last launch of a step counts."""
    rows, variant, fast, splits, chunk = known
    call, device = calls[0], out.device
    slots = _slots(call)
    values = variant.values
    q = query_rows(calls, call.scale, variant)
    batch, heads, count, _ = q.exact.shape
    queries = call.q.shape[2]
    row_tiles = -(-count // variant.rows)
    parts = splits + (0 if fast is None else fast.parts)
    exact = q.exact.new_empty(batch, heads, splits, count, values.dim)
    packed = (
        exact if values.form is None else exact.new_empty(batch, heads, parts, *exact.shape[3:])
    )
    lse = exact.new_empty(batch, heads, parts, count)
    levels = [exact if one is None else one.levels for one in slots]
    shape = (queries, count // queries, heads, splits, parts)
    attend_general[row_tiles * heads, splits, batch](
        rows.table, *q, *levels, packed, exact, lse, *shape,
        call.config.softcap or 0.0, variant, num_warps=variant.warps, maxnreg=255,
        enable_fp_fusion=False,
    )  # fmt: skip
    if fast is not None:
        attend_fast(fast, calls, call.scale, rows.table, packed, lse, splits)
    new = attend_new(calls, call.scale) if chunk else PromptTokens(exact, lse)
    steps = [step for x in new for step in x.stride()[:3]] if chunk else [0] * 6
    signs = signs_of(_codecs(call)[0 if call.latent else 1], device)
    each, at_once = merged_at_once(count, values.width)
    merge_parts[-(-count // each), heads, batch](
        rows.table, packed, exact, lse, exact if signs is None else signs, out, *shape,
        *new, *steps,
        values.dim, values.width, values.form is not None, signs is not None, chunk, each, at_once,
        counting, num_warps=merge_warps(each, values.width), maxnreg=None if each == 1 else 255,
        enable_fp_fusion=False,
    )  # fmt: skip
