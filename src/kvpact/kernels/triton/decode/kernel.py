"""The kernel that decodes packed tokens to dense numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.casts import saturated
from kvpact.kernels.triton.slots import segment_at, tile_numbers
from kvpact.kernels.triton.transforms import rotated_back


@triton.jit(do_not_specialize=["start", "end", "batch", "segments", "tiles_per_segment"])
def decode_tiles(
    TABLE, HEADS, LEVELS, SIGNS, OUT, out_row, out_head, out_token, start, end, batch, segments,
    tiles_per_segment, FORM: tl.constexpr, DIM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Decode a tile of 32 tokens of one row and head.

    `TABLE`, `HEADS`, `batch`, `segments`, `tiles_per_segment`: as of `segment_at`; `LEVELS`,
    `FORM`: as of `tile_numbers`. `SIGNS`: as of `rotated_back`. `OUT`: to token `start` of the
    first row and head: fp32, fp16 or bf16. `out_row`, `out_head`, `out_token`: strides of `OUT`, in
    numbers. `DIM`: channels of a vector; a trellis may have more codes.
    """
    tile, head, row = start // 32 + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, inside = segment_at(slots, tile)
    x = tile_numbers(segment, LEVELS, inside, 0, FORM.padded, FORM)
    if INVERSE:
        x = rotated_back(x, SIGNS, 32, FORM.padded, DIM)
    token, d = tile * 32 + tl.arange(0, 32), tl.arange(0, FORM.padded)
    place = tl.cast(row, tl.int64) * out_row + tl.cast(head, tl.int64) * out_head
    tokens = (token - start).to(tl.int64) * out_token
    live = (token >= start) & (token < end)
    tl.store(
        OUT + place + tokens[:, None] + d[None, :],
        saturated(x, OUT.dtype.element_ty),
        mask=live[:, None] & (d < DIM)[None, :],
    )
