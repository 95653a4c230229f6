"""Decoding by a Triton kernel: the torch body's numbers, to the bit."""

from __future__ import annotations

from torch import Tensor

from kvpact.formats import TILE
from kvpact.kernels.base import SlotReader, check_out
from kvpact.kernels.triton.decode.kernel import decode_keys, decode_tiles
from kvpact.kernels.triton.forms import Places, SlotForm, Slots, places_of, slots_of
from kvpact.kernels.triton.trellis.queries import key_tables
from kvpact.methods import Codec
from kvpact.methods.trellis_keys import TreatedKeys
from kvpact.transforms import RandomHadamard


def _width(codec: Codec, form: SlotForm) -> int:
    """Return how many channels a vector has."""
    return codec.transform.dim if isinstance(codec.transform, RandomHadamard) else form.dim


def _warps(form: SlotForm) -> int:
    """Return how many warps hold a tile without spilling registers."""
    return min(form.padded // 16, 8)


def decode_triton(slots: SlotReader, start: int, end: int, out: Tensor, inverse: bool) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`."""
    codec = slots.codec
    known = slots_of(codec, out.device)
    form = known.form
    assert form is not None and known.levels is not None, known.reason
    dim = _width(codec, form)
    check_out(out, start, end, dim)
    batch, heads = out.shape[:2]
    places = places_of(slots.source, known, batch, out.device)
    if not out.numel():
        return
    if isinstance(codec, TreatedKeys):
        _decode_keys(codec, known, places, start, end, out)
        return
    transform, signs, rotated = codec.transform, known.levels, False
    if isinstance(transform, RandomHadamard):
        signs, rotated = transform.signs(out.device), True
    grid = (-(-end // TILE) - start // TILE, heads, batch)
    decode_tiles[grid](
        places.table, places.heads, known.levels, signs, out, *out.stride()[:3], start, end, batch,
        places.segments, places.tiles,
        FORM=form, DIM=dim, INVERSE=inverse and rotated, num_warps=_warps(form),
        enable_fp_fusion=False,
    )  # fmt: skip


def _decode_keys(
    codec: TreatedKeys, known: Slots, places: Places, start: int, end: int, out: Tensor
) -> None:
    form, tables = known.form, key_tables(codec, codec.form, out.shape[1], out.device)
    assert form is not None
    tiles = -(-end // TILE) - start // TILE
    decode_keys[tiles * len(codec.form.blocks), out.shape[1], out.shape[0]](
        places.table, places.heads, known.levels, *tables[:5], out, *out.stride()[:3], start, end,
        out.shape[0], places.segments, places.tiles,
        FORM=form, num_warps=_warps(form), enable_fp_fusion=False,
    )  # fmt: skip
