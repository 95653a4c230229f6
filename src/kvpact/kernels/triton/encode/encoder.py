"""Encoding on the device: coverage and launches.

The codec's `encode` and the fields' `write` define the bytes. Nothing is read back: the host waits
only where the checks of tokens are wanted at once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError
from kvpact.formats import TILE
from kvpact.kernels.base import Prepared
from kvpact.kernels.sources import WritableSource
from kvpact.kernels.torch.slots import TorchEncoder
from kvpact.kernels.triton.encode.kernel import (
    CHANNELS,
    check_tokens,
    encode_groups,
    encode_tokens,
    rotate_tokens,
)
from kvpact.kernels.triton.encode.trellis_groups import choose_bases
from kvpact.kernels.triton.encode.trellis_kernels import search_codes, store_codes, treat_tokens
from kvpact.kernels.triton.forms import SlotForm, SlotPlaces, Slots, on_device, places_of, slots_of
from kvpact.kernels.triton.trellis.queries import KeyTables, key_tables
from kvpact.methods import Codec
from kvpact.quantizers.checks import checks_are_deferred, require

_NUMBERS = 2048  # numbers of the tokens that a program has in its registers at a time
_AT_A_TIME = 1 << 24
"""Numbers of trellises that are encoded together: kernels leave 7 bytes of each to the next one."""
_EXACT = {"enable_fp_fusion": False, "num_stages": 1}
"""A fused product and sum would make other bytes."""


def rows_of(form: SlotForm, tokens: int) -> int:
    """Return how many tokens a program encodes at a time, a power of two up to 32."""
    return 1 if tokens == 1 else min(TILE, max(1, _NUMBERS // form.padded))


def warps_of(form: SlotForm, tokens: int) -> int:
    """Return the warps of a program that encodes so many tokens."""
    return min(4, max(1, rows_of(form, tokens) * form.padded // 512))


def span_of(form: SlotForm, tokens: int) -> int:
    """Return how many positions a program has: whole words of codes."""
    # No two programs may share the tokens of one word of codes.
    word = TILE // (form.bits & -form.bits) if form.order == "channel" else 1
    return max(rows_of(form, tokens), word)


def blocks_of(form: SlotForm, tokens: int) -> int:
    """Return the programs of a row and head where positions are of no account."""
    return -(-tokens // rows_of(form, tokens))


def _variant(form: SlotForm, tokens: int) -> dict[str, Any]:
    """Return the constants and options that a kernel is compiled with."""
    rows, warps = rows_of(form, tokens), warps_of(form, tokens)
    return {"ROWS": rows, "FORM": form, "num_warps": warps, **_EXACT}


def _dense(x: Tensor) -> Tensor:
    """Return tokens whose channels lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


class TritonEncoder:
    """Encodes tokens on their device, if `Slots.encode_reason` is empty; not for two threads."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self._torch = codec, TorchEncoder(codec)

    def prepare(self, x: Tensor, size: float | None = None) -> Prepared:
        """Return tokens that can't fail any more, or arrays of the torch body, which refuses."""
        if not self._codec.ready:
            return self._torch.prepare(x)  # which learns
        if slots_of(self._codec, x.device).known.limit == math.inf or not x.numel():
            return x
        good = torch.ones((), dtype=torch.bool, device=x.device)
        check_tokens_at(self._codec, x, good)
        if checks_are_deferred():
            require(good, lambda: NonFiniteError("beyond the range of the method"))
        elif not bool(good):
            return self._torch.prepare(x)
        return x

    def write(self, prepared: Prepared, source: WritableSource, start: int) -> None:
        """Encode tokens into segments; or `GeometryError`, and all slots are as they were."""
        if isinstance(prepared, dict):
            self._torch.write(prepared, source, start)
        elif prepared.numel():
            form, device = slots_of(self._codec, prepared.device).known, prepared.device
            found = places_of(source, form, len(prepared), device)
            encode_at(self._codec, prepared, found, start)


def check_tokens_at(codec: Codec, x: Tensor, good: Tensor) -> None:
    """Make a 0-d bool on the device False if some of the tokens `[B, H, T, D]` can't be encoded."""
    x, tables = _dense(x), slots_of(codec, x.device)
    form, (batch, heads, tokens, _) = tables.known, x.shape
    if form.limit == math.inf:
        return
    with on_device(x.device):
        check_tokens[blocks_of(form, tokens), heads, batch](
            x,
            *x.stride()[:3],
            *tables[-3:],
            good.view(torch.int8),
            tokens,
            **_variant(form, tokens),
        )


def encode_at(codec: Codec, x: Tensor, slots: SlotPlaces, start: int) -> None:
    """Encode tokens `[B, H, T, D]` from a position on, whole groups of the codec."""
    x, tables = _dense(x), slots_of(codec, x.device)
    form, (batch, heads, tokens, _) = tables.known, x.shape
    where, counts = (slots.table, slots.heads), (slots.tiles, batch, slots.segments)
    with on_device(x.device):
        if form.trellis is not None:
            encode_trellis(codec, form, x, slots, start, None)
            return
        if form.staged:
            x = _rotated(x, tables)
        if form.group > 1:
            chunks = -(-form.dim // CHANNELS)
            encode_groups[tokens // form.group * chunks, heads, batch](
                x, *x.stride()[:3], *where, start, *counts, FORM=form, num_warps=4, **_EXACT
            )
        span = span_of(form, tokens)
        encode_tokens[(start + tokens - 1) // span - start // span + 1, heads, batch](
            x, *x.stride()[:3], *where, *tables[-3:], start, tokens, *counts, SPAN=span,
            **_variant(form, tokens),
        )  # fmt: skip


def _rotated(x: Tensor, tables: Slots) -> Tensor:
    """Return rotated tokens, fp32."""
    batch, heads, tokens, _ = x.shape
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rotate_tokens[(blocks_of(tables.known, tokens), heads, batch)](
        x, *x.stride()[:3], tables.signs, y, tokens, **_variant(tables.known, tokens)
    )
    return y


def tile_warps(form: SlotForm) -> int:
    """Return the warps of programs that hold the tokens of a tile."""
    return min(max(form.padded // 32, 1), 16)


def encode_trellis(
    codec: Codec, form: SlotForm, x: Tensor, slots: SlotPlaces, start: int, held: Tensor | None
) -> None:
    """Encode whole groups from `start` on, or from `held`, `[B, …]` int64 on the device, by row."""
    batch, heads, tokens, _ = x.shape
    tables = key_tables(codec, heads, x.device)
    unit = max(form.group, TILE)
    count = max(_AT_A_TIME // (batch * heads * form.dim * unit), 1) * unit
    done = 0
    while done < tokens:
        # Pieces end where tiles do: no word of codes belongs to two of them.
        end = min((start + done) // unit * unit + count - start, tokens)
        _encode_piece(form, x[:, :, done:end], slots, tables, start + done, held)
        done = end


def _encode_piece(
    form: SlotForm,
    x: Tensor,
    slots: SlotPlaces,
    tables: KeyTables,
    start: int,
    held: Tensor | None,
) -> None:
    batch, heads, tokens, _ = x.shape
    if form.group > 1:
        groups = tokens // form.group
        means = torch.empty(batch, heads, groups, form.dim, dtype=torch.float32, device=x.device)
        inside = torch.empty(batch, heads, groups, form.group, dtype=torch.int8, device=x.device)
        choose_bases[groups, heads, batch](
            x, *x.stride()[:3], slots.table, slots.heads, tables.weight, tables.first, means,
            inside, start, slots.tiles, batch, slots.segments, FORM=form,
            num_warps=tile_warps(form), **_EXACT,
        )  # fmt: skip
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
        FORM=form, BEHIND=behind, num_warps=tile_warps(form), **_EXACT,
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
