"""The numbers that the slots of 32 tokens stand for, of every format.

They are those of `codec.decode`, to the bit: products and sums in its order. Launch kernels that
use them with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.trellis.numbers import trellis_numbers

_TYPES = {
    "fp32": tl.float32,
    "fp16": tl.float16,
    "bf16": tl.bfloat16,
    "i32": tl.int32,
    "i8": tl.int8,
    "u8": tl.uint8,
}


@triton.constexpr_function
def pointer_to(name):
    """Return the type of a pointer to numbers of a dtype by its name in `forms.NUMBERS`."""
    return tl.pointer_type(_TYPES[name])


@triton.jit
def segment_at(slots, tile):
    """Return where the segment of a tile lies, for `units_of`, and the number of the tile in it.

    `slots`: `TABLE` (`[fields, batch, segments]` int64, `SlotPlaces.table`), `HEADS` (`[fields]`
    int64, `SlotPlaces.heads`), row, head, `batch`, `segments`, and the tiles of a segment.
    """
    table, heads, row, head, batch, segments, tiles = slots
    return (table, heads, row, head, tile // tiles, batch, segments), tile % tiles


@triton.jit
def units_of(NAME: tl.constexpr, segment, FORM: tl.constexpr):
    """Return a pointer to the units of a field `NAME` of a segment and head; from `segment_at`."""
    INDEX: tl.constexpr = FORM.index_of(NAME)
    TYPE: tl.constexpr = FORM.type_of(NAME)
    table, heads, row, head, number, batch, segments = segment
    first = tl.load(table + (INDEX * batch + row) * segments + number)
    return (first + tl.load(heads + INDEX) * head).to(pointer_to(TYPE))


@triton.jit
def _plane_by_token(
    tile, first, FIRST: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr
):
    """Return a plane of K's codes, int32 [32, COUNT]; `tile` holds words [2, words, 16]."""
    PER: tl.constexpr = 32 // WIDTH
    i, k = tl.arange(0, 32), tl.arange(0, PER)
    w = first // PER + tl.arange(0, COUNT // PER)
    tokens = i // 16 * (FORM.words * 16) + i % 16
    words = tl.load(
        tile + tokens[:, None] + ((FIRST + w) * 16)[None, :],
        mask=(w * PER < FORM.dim)[None, :],
        other=0,
    )
    codes = (words[:, :, None] >> (k * WIDTH)[None, None, :]) & ((1 << WIDTH) - 1)
    return codes.reshape(32, COUNT)


@triton.jit
def _plane_by_channel(
    tile, first, FIRST: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr
):
    """Return a plane of V's codes, int32 [32, COUNT]; `tile` holds words [bits, dim]."""
    PER: tl.constexpr = 32 // WIDTH
    r, d, k = tl.arange(0, WIDTH), first + tl.arange(0, COUNT), tl.arange(0, PER)
    words = tl.load(
        tile + ((FIRST + r) * FORM.dim)[:, None] + d[None, :], mask=(d < FORM.dim)[None, :], other=0
    )
    codes = (words[:, None, :] >> (k * WIDTH)[None, :, None]) & ((1 << WIDTH) - 1)
    return codes.reshape(32, COUNT)


@triton.jit
def _plane(tile, first, PLANE: tl.constexpr, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return a plane of a tile's codes where its bits belong, int32 [32, COUNT]."""
    WIDTH: tl.constexpr = FORM.plane_width(PLANE)
    if FORM.order == "token":
        codes = _plane_by_token(tile, first, FORM.plane_words(PLANE), WIDTH, COUNT, FORM)
    else:
        codes = _plane_by_channel(tile, first, FORM.plane_shift(PLANE), WIDTH, COUNT, FORM)
    return codes << FORM.plane_shift(PLANE)


@triton.jit
def _codes(tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return the codes of a tile, int32 [32, COUNT]; `tile` points to its words."""
    codes = _plane(tile, first, 0, COUNT, FORM)
    for plane in tl.static_range(1, FORM.plane_count()):
        codes |= _plane(tile, first, plane, COUNT, FORM)
    return codes


@triton.jit
def _e4m3(codes):
    """Return the numbers of e4m3 bytes; by hand, as not all GPUs convert them."""
    codes = codes.to(tl.int16)
    size = codes & 127
    # The bits of the same number over 256 in fp16, be it subnormal or not.
    number = ((codes & 128) << 8 | size << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(size == 127, float("nan"), number)


@triton.jit
def _levels(codes, LEVELS, FORM: tl.constexpr):
    """Return what codes stand for before any scale, fp32."""
    if FORM.kind == "table":
        levels = tl.load(LEVELS + codes)
    else:
        levels = codes.to(tl.float32) + tl.load(LEVELS)
    if FORM.middle != 0.0:
        levels = levels + FORM.middle
    return levels


@triton.jit
def _given(tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return numbers that are stored themselves, fp32 [32, COUNT]; `tile` holds [dim, 32]."""
    i, d = tl.arange(0, 32), first + tl.arange(0, COUNT)
    x = tl.load(tile + (d * 32)[None, :] + i[:, None], mask=(d < FORM.dim)[None, :], other=0)
    if FORM.kind == "e4m3":
        x = _e4m3(x)
    elif FORM.kind == "e5m2":
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)  # the upper halves of fp16
    return x.to(tl.float32)


@triton.jit
def _by_token(tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return a number per token and group of channels as fp32 that fits [32, COUNT]."""
    i, d = tl.arange(0, 32), first + tl.arange(0, COUNT)
    if FORM.channels >= FORM.dim:
        x = tl.load(tile + i)[:, None]
    else:
        group = d // FORM.channels
        place = (group * 32)[None, :] + i[:, None]
        x = tl.load(tile + place, mask=(d < FORM.dim)[None, :], other=0)
    return x.to(tl.float32)


@triton.jit
def by_group(units, tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return a number per channel of a tile's group of tokens, fp32 [1, COUNT]."""
    d = first + tl.arange(0, COUNT)
    unit = tile * 32 // FORM.group
    return tl.load(units + unit * FORM.dim + d, mask=d < FORM.dim, other=0).to(tl.float32)[None, :]


@triton.jit
def _scaled(x, segment, tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return levels [32, COUNT] with scale, zero, fold and shift, in the order of `decode`."""
    if FORM.has("fold"):
        fold = by_group(units_of("fold", segment, FORM), tile, first, COUNT, FORM)
    if FORM.has("shift"):
        shift = by_group(units_of("shift", segment, FORM), tile, first, COUNT, FORM)
    if FORM.has("fold") and FORM.order == "token":
        x = x * fold
    if FORM.has("shift") and FORM.shift_scaled:
        x = x + shift
    if FORM.has("scale"):
        scale = units_of("scale", segment, FORM) + tile * (FORM.groups * 32)
        x = x * _by_token(scale, first, COUNT, FORM)
    if FORM.has("zero"):
        x = x + _by_token(
            units_of("zero", segment, FORM) + tile * (FORM.groups * 32), first, COUNT, FORM
        )
    if FORM.has("shift") and not FORM.shift_scaled:
        x = x + shift
    if FORM.has("fold") and FORM.order == "channel":
        x = x * fold
    return x


@triton.jit
def tile_numbers(segment, LEVELS, tile, first, COUNT: tl.constexpr, FORM: tl.constexpr):
    """Return what `codec.decode` gives of 32 tokens, still transformed: fp32 [32, COUNT].

    Channels from `FORM.dim` on are 0. Of a trellis: `trellis_numbers`, before any treatment.

    `segment`: as of `units_of`; `tile`: of 32 tokens inside the segment; `first`: the first
    channel, a multiple of 32; `COUNT`: channels, a power of two of 32 or more.
    """
    tile = tl.cast(tile, tl.int64)
    units = units_of("codes", segment, FORM)
    channel = first + tl.arange(0, COUNT)
    if FORM.kind == "trellis":
        x = trellis_numbers(units, units_of("scale", segment, FORM), LEVELS, tile, channel, FORM)
    else:
        if FORM.in_words:
            words: tl.constexpr = FORM.words * (32 if FORM.order == "token" else FORM.dim)
            x = _levels(_codes(units + tile * words, first, COUNT, FORM), LEVELS, FORM)
        else:
            x = _given(units + tile * (FORM.dim * 32), first, COUNT, FORM)
        x = _scaled(x, segment, tile, first, COUNT, FORM)
        if FORM.dim % COUNT != 0:
            x = tl.where((channel < FORM.dim)[None, :], x, 0.0)
    return x
