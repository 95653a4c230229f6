"""Numbers per channel of K and group of tokens: shifts, one product per query and group.

A block has one section for each group of tokens, or is one where it lies within a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.tiles import positions, tiles_at, tiles_together

if TYPE_CHECKING:
    from kvpact.kernels.triton.forms import SlotForm


@triton.constexpr_function
def sections_of(form: SlotForm, tiles: int) -> int:
    """Return the groups of tokens of a block of so many tiles; 1 where it lies within one."""
    return max(1, tiles * 32 // form.group) if form.group else 1


@triton.constexpr_function
def _mixed(form: SlotForm, tiles: int, vbits: int) -> bool:
    """Return whether eight rows of a product have tokens of more than one section."""
    return sections_of(form, tiles) > 1 and tiles_together(vbits) > 1


@triton.jit
def group_numbers(
    SEGMENTS, head_bytes, block, last, tiles, C: tl.constexpr, NT: tl.constexpr,
    FORM: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Load a number per channel of each section of a block, fp32 `[T, C]`.

    `SEGMENTS`, `head_bytes`: of the field, from `tiles.segments_of`. `block`, `last`, `tiles`: the
    block, the token behind the last one, and the tiles of a segment. `C`, `NT`, `FORM`, `INSIDE`:
    channels, those of the slots filled up; the others as of `attend_digits`.
    """
    T: tl.constexpr = sections_of(FORM, NT)
    tile = block * NT + tl.arange(0, T) * (NT // T)
    live = tile * 32 < last
    if INSIDE:
        segment = block * NT // tiles
    else:
        segment = tl.where(live, tile // tiles, 0)
    group = (tile - segment * tiles) * 32 // FORM.group
    at = tiles_at(SEGMENTS, head_bytes, segment, group, FORM.dim, "fp16")[:, None]
    at = tl.multiple_of(at, [16, 16])
    c = tl.arange(0, C)[None, :]
    seen = live[:, None]
    if FORM.dim < C:
        seen = seen & (c < FORM.dim)
    return tl.load(at + c, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def by_section(x, N: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr):
    """Return for each token what its section has: `[T, 1 or N, G]` to `[N, G]`."""
    T: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[2]
    if _mixed(FORM, N // 32, VBITS):
        section = positions(0, N // 32, VBITS) // FORM.group
        own = section[None, :] == tl.arange(0, T)[:, None]
        return tl.sum(tl.where(own[:, :, None], x, 0.0), 0)
    else:
        return tl.broadcast_to(x, (T, N // T, G)).reshape(N, G)
