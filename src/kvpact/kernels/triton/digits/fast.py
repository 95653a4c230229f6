"""The fast kernels: the packed tokens that they attend, and their launch."""

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.triton.digits.digits import attend_digits
from kvpact.kernels.triton.digits.operands import level_worth
from kvpact.kernels.triton.digits.tables import (
    LEAST_ROWS,
    LOG2_E,
    queries_of,
    table_words,
    whole_levels,
    whole_slots,
)
from kvpact.kernels.triton.digits.tiles import TOGETHER
from kvpact.kernels.triton.forms import SlotForm, Slots, power_of_two
from kvpact.kernels.triton.trellis import fast as trellis
from kvpact.kernels.triton.tuning import Choice, block_tiles, choice, parts_of, side_by_side

MOST_ROWS = 16
"""Query rows of a KV head: more make decoding cheap next to products, and take all registers."""
MOST_MIXED_ROWS = 8  # the same where there are zeros or shifts
LEAST_TOKENS = 256  # packed tokens from which on a second launch pays
_VECTORS = ("codes", "scale", "zero", "shift", "mean")
"""Fields that kernels read 16 bytes at a time."""
_LEAST_GROUP = {2: 64, 3: 128, 4: 32, 8: 32}  # channels of K of one step of a product, by bits


class Fast(NamedTuple):
    """The work of the fast kernels for calls of one kind."""

    k: Slots
    v: Slots
    choice: Choice
    inside: bool  # no block reaches over the end of a segment
    parts: int
    kw: int  # bytes of k that stand side by side


def digits_reason(k: Slots, v: Slots, rows: int) -> str:
    """Return why integer products don't cover slots for so many query rows; "" if they do."""
    if rows > MOST_ROWS:
        return f"{rows} query rows of a KV head; there are {MOST_ROWS} at most"
    if k.form is not None and v.form is not None and "trellis" in (k.form.kind, v.form.kind):
        return trellis.trellis_reason(k.form, "token") or trellis.trellis_reason(v.form, "channel")
    if reason := _form_reason("K", k.form, "token") or _form_reason("V", v.form, "channel"):
        return reason
    forms = [slots.form for slots in (k, v) if slots.form is not None]
    more = any(form.has(name) for form in forms for name in ("zero", "shift"))
    if more and rows > MOST_MIXED_ROWS:
        return f"zeros or shifts and {rows} query rows of a KV head; {MOST_MIXED_ROWS} are covered"
    return ""


def _form_reason(side: str, form: SlotForm | None, order: str) -> str:
    if form is None or form.order != order or not whole_levels(form).whole:
        return f"{side} has no levels of whole numbers"
    if form.bits not in TOGETHER or (form.bits == 8 and not form.signed):
        return f"{side} has codes of {form.bits} bits"
    if form.has("fold"):
        return f"{side} has scales per channel"
    if not _known_fields(form, order):
        return f"{side} has more to it than scales, zeros and shifts"
    if form.dim > trellis.MOST_WIDTH or form.dim % 8:
        return f"{side} is {form.dim} wide; multiples of 8 up to {trellis.MOST_WIDTH} are covered"
    least = _LEAST_GROUP[form.bits] if order == "token" else 32
    if form.groups > 1 and (form.channels < least or form.channels & (form.channels - 1)):
        return f"{side} has scales for groups of {form.channels} channels"
    return ""


def _known_fields(form: SlotForm, order: str) -> bool:
    """Return whether the kernel knows what stands with the codes."""
    if any(form.has(name) for name in ("base", "mean", "step")):
        return False
    if not form.has("shift"):
        return form.has("scale")
    fits = order == "token" and form.has("scale") and not form.shift_scaled and not form.middle
    even = form.group % 32 == 0 and form.group & (form.group - 1) == 0
    return fits and even and not form.has("zero") and form.groups == 1


def fast_range(call: AttendCall) -> tuple[int | Tensor, int]:
    """Return the first token that the fast kernels attend, by row `[B]` perhaps, and the end.

    All queries see these tokens, but for what a sliding window hides from some of them. No sink
    tokens are among them, and no padding. There are none where the first is not below the end.
    """
    view, config = call.view, call.config
    if view is None or config.mask is not None or call.latent or view.k.offset is not None:
        return 0, 0
    query = call.held + call.new - call.q.shape[2]
    end = min(view.k.exact_from, view.v.exact_from)
    if config.is_causal:
        end = min(end, query + 1)
    window = 0 if config.sliding_window is None else query - config.sliding_window + 1
    sinks = [0 if each.sinks is None else each.sinks.shape[2] for each in (view.k, view.v)]
    first: int | Tensor = max(sinks)
    if view.padding is not None:
        first = first + view.padding
    if call.padding is not None:
        padding = call.padding
        first = padding.clamp(min=first) if isinstance(first, int) else first.maximum(padding)
    if isinstance(first, int):
        return max(first, window), end
    return first.clamp(min=window), end


def _aligned(source: SegmentSource, form: SlotForm) -> bool:
    """Return whether fields read in vectors lie at multiples of 16 bytes; once for a source."""
    found: bool | None = source.prepared.get("triton:aligned")
    if found is None:
        parts = form.parts
        held = [source.where(parts[name].name) for name in _VECTORS if name in parts]
        found = all(
            where is not None and not any(where.segments % 16) and not (where.row | where.head) % 16
            for where in held
        )
        source.prepared["triton:aligned"] = found
    return found


def launch_of(k: SlotForm, v: SlotForm, rows: int, sizes: Set[int]) -> tuple[Choice, bool]:
    """Return how a kernel is launched, and whether no block reaches over the end of a segment."""
    chosen = trellis.trellis_choice(k, v, rows) if k.kind == "trellis" else None
    tiles = block_tiles(v.bits) if chosen is None else chosen.tiles
    inside = all(size % (tiles * 32) == 0 for size in sizes)
    if chosen is not None:
        return chosen, inside
    return choice(v.bits, rows, inside), inside


def fast_of(calls: Sequence[AttendCall], k: Slots | None, v: Slots | None) -> Fast | None:
    """Return the fast kernels' part in calls of one kind; None where they have none."""
    call = calls[0]
    if k is None or v is None or k.form is None or v.form is None:
        return None
    rows = call.query_rows
    if digits_reason(k, v, rows):
        return None
    ends = [fast_range(each)[1] for each in calls]
    views = [
        each.view for each, end in zip(calls, ends, strict=True) if each.view is not None and end
    ]
    sides = [(view.k.source, k.form) for view in views]
    sides += [(view.v.source, v.form) for view in views]
    sizes = {source.segment_tokens for source, _ in sides}
    longest = max(ends)
    if longest < LEAST_TOKENS or len(sizes) > 1 or not all(_aligned(*side) for side in sides):
        return None
    chosen, inside = launch_of(k.form, v.form, rows, sizes)
    programs = sum(each.q.shape[0] for each in calls) * call.kv_heads
    parts = parts_of(longest, programs, call.q.device)
    return Fast(whole_slots(k), whole_slots(v), chosen, inside, parts, side_by_side())


def attend_fast(
    fast: Fast,
    calls: Sequence[AttendCall],
    scale: float,
    table: Tensor,
    packed: Tensor,
    lse: Tensor,
    first_part: int,
) -> None:
    """Write the parts of the tokens from SKIP_FROM to SKIP_TO of each row (see `attend_digits`)."""
    batch, heads, parts, rows, _ = packed.shape
    call, k, v, chosen = calls[0], fast.k.form, fast.v.form, fast.choice
    assert k is not None and v is not None
    if k.kind == "trellis":
        asked = trellis.treated_queries(calls, k, scale, fast.kw)
        levels = (trellis.level_table(k, packed.device), trellis.level_table(v, packed.device))
        worth = v.steps[0].unit
    else:
        q = call.q if len(calls) == 1 else torch.cat([each.q for each in calls])
        q = q if q.stride(3) == 1 else q.contiguous()
        asked = queries_of(q, heads, scale, fast.k, fast.kw)
        levels, worth = (table_words(fast.k), table_words(fast.v)), level_worth(v)
    cap = call.config.softcap
    ptx = isinstance(attend_digits, triton.JITFunction) and torch.version.hip is None
    attend_digits[fast.parts, heads, batch](
        table, *asked, *levels, packed, lse, heads, call.q.shape[2], rows, first_part, parts,
        worth, (cap or 1.0) * LOG2_E, k, v, max(power_of_two(rows), LEAST_ROWS), chosen.tiles,
        fast.inside, cap is not None, fast.kw, ptx, num_warps=chosen.warps,
        num_stages=chosen.stages, maxnreg=chosen.registers, enable_fp_fusion=True,
    )  # fmt: skip
