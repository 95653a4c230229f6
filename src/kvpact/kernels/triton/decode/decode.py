"""Decoding by a Triton kernel: the torch body's numbers, to the bit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpact.formats import TILE
from kvpact.kernels.base import SlotReader, check_out
from kvpact.kernels.triton.decode.kernel import decode_keys, decode_tiles
from kvpact.kernels.triton.forms import places_of, slots_of
from kvpact.kernels.triton.trellis.queries import key_tables
from kvpact.methods.trellis_learning import TreatedKeys


def decode_triton(slots: SlotReader, start: int, end: int, out: Tensor, inverse: bool) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`."""
    codec, known = slots.codec, slots_of(slots.codec, out.device)
    form = known.form
    assert form is not None, known.reason
    check_out(out, start, end, form.dim)
    batch, heads = out.shape[:2]
    places = places_of(slots.source, form, batch, out.device)
    if not out.numel():
        return
    tiles = -(-end // TILE) - start // TILE
    where = (places.table, places.heads, known.levels)
    rest = (out, *out.stride()[:3], start, end, batch, places.segments, places.tiles)
    # As many warps as hold a tile without spilling registers.
    options: dict[str, Any] = {"num_warps": min(form.padded // 16, 8), "enable_fp_fusion": False}
    if isinstance(codec, TreatedKeys):
        blocks, device = len(codec.trellis.blocks), out.device
        tables = key_tables(codec, heads, device)
        decode_keys[tiles * blocks, heads, batch](*where, *tables[:5], *rest, FORM=form, **options)
        return
    inverse = inverse and form.rotates
    decode_tiles[tiles, heads, batch](
        *where, known.signs, *rest, FORM=form, INVERSE=inverse, **options
    )
