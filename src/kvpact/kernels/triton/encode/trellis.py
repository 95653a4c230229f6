"""Encoding of trellises on the device: who launches what. `viterbi` finds the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.formats import TILE
from kvpact.kernels.triton.encode.form import EncodeForm
from kvpact.kernels.triton.encode.trellis_groups import choose_bases
from kvpact.kernels.triton.encode.trellis_kernels import search_codes, store_codes, treat_tokens
from kvpact.kernels.triton.forms import Places
from kvpact.kernels.triton.trellis.queries import KeyTables, key_tables
from kvpact.methods import Codec

_AT_A_TIME = 1 << 24
"""Numbers that are encoded together: kernels leave 7 bytes of each to the next one."""
_EXACT = {"enable_fp_fusion": False, "num_stages": 1}
"""A fused product and sum would make other bytes."""


def warps_of(form: EncodeForm) -> int:
    """Return the warps of programs that hold the tokens of a tile."""
    return min(max(form.padded // 32, 1), 16)


def encode_trellis(
    codec: Codec, form: EncodeForm, x: Tensor, slots: Places, start: int, held: Tensor | None
) -> None:
    """Encode tokens, whole groups of the codec.

    `x`: `[B, H, T, D]`, the channels side by side; `start`: position of the first token; `held`:
    `[B, …]` int64 on the device: instead of `start`, by row, for few tokens.
    """
    batch, heads, tokens, _ = x.shape
    assert form.trellis is not None
    tables = key_tables(codec, form.trellis, heads, x.device)
    unit = max(form.group, TILE)
    count = max(_AT_A_TIME // (batch * heads * form.dim * unit), 1) * unit
    done = 0
    while done < tokens:
        # Pieces end where tiles do: no word of codes belongs to two of them.
        end = min((start + done) // unit * unit + count - start, tokens)
        _encode_piece(form, x[:, :, done:end], slots, tables, start + done, held)
        done = end


def _encode_piece(
    form: EncodeForm,
    x: Tensor,
    slots: Places,
    tables: KeyTables,
    start: int,
    held: Tensor | None,
) -> None:
    batch, heads, tokens, _ = x.shape
    if form.group > 1:
        _choose_bases(form, x, slots, tables, start)
    last = TILE - 1 if held is not None else start % TILE
    tiles, counts = (last + tokens - 1) // TILE + 1, (slots.tiles, batch, slots.segments)
    shape = (batch, heads, tiles, form.dim, TILE)
    numbers = torch.empty(shape, dtype=torch.float32, device=x.device)
    back = torch.empty(shape, dtype=torch.int16, device=x.device)
    codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
    behind = held is not None
    where = (slots.table, slots.heads, *((held, held.stride(0)) if held is not None else (x, 0)))
    treat_tokens[tiles, heads, batch](
        x, *x.stride()[:3], *where, *tables[:5], numbers, start, tokens, *counts,
        FORM=form, BEHIND=behind, num_warps=warps_of(form), **_EXACT,
    )  # fmt: skip
    # Left to itself the assembler spills some of 70 registers.
    search_codes[tiles, heads * len(form.steps), batch](
        *where, numbers, back, codes, tables.cells, start, tokens, heads, *counts,
        FORM=form, BEHIND=behind, num_warps=1, maxnreg=255, **_EXACT,
    )  # fmt: skip
    store_codes[tiles, heads, batch](
        *where, codes, start, tokens, *counts,
        FORM=form, BEHIND=behind, num_warps=4, **_EXACT,
    )  # fmt: skip


def _choose_bases(
    form: EncodeForm, x: Tensor, slots: Places, tables: KeyTables, start: int
) -> None:
    """Store means of groups, and the base of each token."""
    batch, heads, tokens, _ = x.shape
    groups = tokens // form.group
    means = torch.empty(batch, heads, groups, form.dim, dtype=torch.float32, device=x.device)
    inside = torch.empty(batch, heads, groups, form.group, dtype=torch.int8, device=x.device)
    choose_bases[groups, heads, batch](
        x, *x.stride()[:3], slots.table, slots.heads, tables.weight, tables.first, means, inside,
        start, slots.tiles, batch, slots.segments,
        FORM=form, num_warps=warps_of(form), **_EXACT,
    )  # fmt: skip
