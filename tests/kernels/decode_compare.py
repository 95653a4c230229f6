"""Numbers by the native decoder against those of the torch body."""

import itertools
from typing import NamedTuple

import pytest
import torch
from encode_compare import DTYPES, SEGMENT, codec_of, random_pieces, torch_slots
from matrix import ENCODED, EXACT

from kvpact.arithmetic import saturated
from kvpact.cache.stream.segments import SegmentList, Slab, SlabShape
from kvpact.errors import DtypeError, GeometryError
from kvpact.kernels import ListSource
from kvpact.kernels.cpu.backend import CPU

FORMATS = (*ENCODED, *EXACT)
GUARD = 12345.0
_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class Slots(NamedTuple):
    codec: object
    source: object


def numbers(codec, store: SegmentList, start: int, end: int, dtype, inverse: bool) -> torch.Tensor:
    """Return what the torch bodies decode."""
    source, count = store.source(), len(store.held_parts())
    arrays = {field.name: field.read(source.gather(field.name, 0, count)) for field in codec.fields}
    y = codec.decode(arrays)[:, :, start:end]
    return saturated(codec.transform.inverse(y) if inverse else y, dtype)


def native(slots: Slots, start: int, end: int, out: torch.Tensor, inverse: bool) -> None:
    CPU.decode(slots, start, end, out, inverse=inverse)


def compare_slots(
    codec, store: SegmentList, start: int, end: int, dtype, inverse: bool, run=native
) -> str:
    """Return what differs between a kernel's numbers (the native one's) and torch's."""
    expected = numbers(codec, store, start, end, dtype, inverse)
    batch, heads, count, dim = expected.shape
    # Between guards on all sides, unaligned, filled with NaN.
    whole = torch.full((batch + 1, heads + 1, count + 2, dim + 3), GUARD, dtype=dtype)
    out = whole[:batch, :heads, 1 : 1 + count, 1 : 1 + dim]
    out.fill_(torch.nan)
    run(Slots(codec, store.source()), start, end, out, inverse)
    found = out.clone()
    out.fill_(GUARD)
    if not (whole == torch.tensor(GUARD, dtype=dtype)).all():
        return "guards overwritten"
    different = (found.view(_BITS[dtype]) != expected.contiguous().view(_BITS[dtype])).sum()
    return f"{int(different)} numbers differ" if different else ""


def packed(spec: str, side: str, tokens: torch.Tensor) -> tuple[object, SegmentList]:
    """Return a codec and the slots of tokens that it encoded."""
    codec = codec_of(spec, side, tokens.shape[3], tokens.dtype)
    segments, (batch, heads) = torch_slots(codec, tokens, 0), tokens.shape[:2]
    shape = SlabShape(codec.fields, batch, heads, SEGMENT)
    slab = Slab.new(shape, len(segments), tokens.device)
    for index, segment in enumerate(segments):
        for name, lies in slab.segment(index).items():
            lies.copy_(segment[name])
    return codec, SegmentList(codec, batch, heads, tokens.device, (slab,))


def compare(spec: str, side: str, dim: int, start: int, end: int, dtype, seed: int = 0) -> str:
    """Return what differs for random tokens, rotated back or not."""
    (tokens,), _ = random_pieces(spec, side, dim, end, 0, dtype, seed)
    codec, store = packed(spec, side, tokens)
    return compare_slots(codec, store, start, end, dtype, True) or compare_slots(
        codec, store, start, end, torch.float32, False
    )


def decoded(spec: str, side: str, dim: int) -> str:
    """Return what differs for codes of a trellis, of keys that learnt from their first 64."""
    learns = codec_of(spec, side, dim, torch.float32).learns_from
    end = max(70, 2 * learns)
    (tokens,), _ = random_pieces(spec, side, dim, end, 0, torch.float32)
    codec, store = packed(spec, side, tokens)
    return compare_slots(codec, store, 5, end - 1, torch.float32, False) or compare_slots(
        codec, store, 0, end, torch.float16, True
    )


PLACES = ((0, 1), (37, 38), (30, 33), (0, 31), (5, 38), (90, 150))


def differences(half: int) -> list[object]:
    """Return what differs, over all formats, sides, widths and dtypes, at every second place."""
    bad = []
    for spec, dim, side in itertools.product(FORMATS, (20, 33, 64, 80, 256), "kv"):
        (tokens,), _ = random_pieces(spec, side, dim, PLACES[-1][1], 0, torch.float32)
        codec, store = packed(spec, side, tokens)
        for (start, end), dtype in [*zip(PLACES, DTYPES * 2, strict=True)][half::2]:
            difference = compare_slots(codec, store, start, end, dtype, start % 2 == 0)
            if difference:
                bad.append((spec, side, dim, start, end, dtype, difference))
    return bad


def check_refusals(decode) -> None:
    """What a decoder can't take raises: other shapes, dtypes and places, numbers with gaps."""
    tokens = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(5))
    codec, store = packed("turboquant:bits=4", "k", tokens)

    def call(out, start=0, end=64):
        decode(Slots(codec, store.source()), start, end, out, True)

    with pytest.raises(GeometryError, match="out has shape"):
        call(torch.empty(1, 2, 63, 64))
    with pytest.raises(GeometryError, match="wide"):
        call(torch.empty(1, 2, 64, 65))
    with pytest.raises(GeometryError, match="gaps"):
        call(torch.empty(1, 2, 64, 128)[..., ::2])
    with pytest.raises(DtypeError, match="float64"):
        call(torch.empty(1, 2, 64, 64, dtype=torch.float64))
    for start, end in ((-1, 10), (10, 9)):
        with pytest.raises(GeometryError, match="out has shape"):
            call(torch.empty(1, 2, abs(end - start), 64), start, end)
    segment = store.segment(0)
    segment["codes"] = segment["codes"].repeat_interleave(2, 2)[:, :, ::2]
    apart = Slots(codec, ListSource((segment,), store.segment_tokens))
    with pytest.raises(GeometryError, match="gaps"):
        decode(apart, 0, 64, torch.empty(1, 2, 64, 64), True)
