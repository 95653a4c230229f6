"""Slots by an encoder against those of the torch body."""

import itertools

import pytest
import torch
from guards import Guards
from matrix import ENCODED as FORMATS
from matrix import TRELLISES
from matrix import UNTREATED as _PLAIN

from kvpact import parse_spec
from kvpact.errors import GeometryError
from kvpact.kernels import ListSource
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import CpuEncoder

WIDTHS = (64, 80, 96, 128, 256, 576)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = (
    (1, 0, torch.float32), (1, 37, torch.float16), (3, 30, torch.bfloat16), (31, 0, torch.float32),
    (33, 5, torch.float16), (140, 100, torch.bfloat16),
)  # fmt: skip
"""How many tokens, the position of the first, and their dtype."""

SEGMENT = 128
SPECIAL = (0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-30, 6e-8, -3e-5, 0.5, 1, -1, 2.5, -400, 400)
"""Zeros of both signs, subnormal and tiny numbers, ties, large numbers."""


def codec_of(spec: str, side: str, dim: int, dtype: torch.dtype):
    method = parse_spec(spec).key
    return (method.key_codec if side == "k" else method.value_codec)(dim, dtype)


def torch_slots(codec, x: torch.Tensor, start: int) -> list[dict[str, torch.Tensor]]:
    """Return the segments after `encode` and `write`."""
    batch, heads, count, _ = x.shape
    segments = [
        {f.name: f.allocate(batch, heads, SEGMENT, x.device) for f in codec.fields}
        for _ in range(-(-(start + count) // SEGMENT))
    ]
    arrays = codec.encode(x.float())
    for field in codec.fields:
        unit, values, done = field.tokens if field.per_group else 1, arrays[field.name], 0
        while done < values.shape[2]:
            index, inside = divmod(start + done * unit, SEGMENT)
            take = min((SEGMENT - inside) // unit, values.shape[2] - done)
            field.write(segments[index][field.name], inside, values[:, :, done : done + take])
            done += take
    return segments


def encoded_slots(
    encoder, codec, pieces: list[torch.Tensor], start: int
) -> list[dict[str, torch.Tensor]]:
    """Return the segments after an encoder took pieces in turn; guards beside them hold."""
    batch, heads = pieces[0].shape[:2]
    total = start + sum(piece.shape[2] for piece in pieces)
    guards, segments = Guards(), []
    for _ in range(-(-total // SEGMENT)):
        plain = {
            f.name: f.allocate(batch, heads, SEGMENT, torch.device("cpu")) for f in codec.fields
        }
        segments.append({name: guards.new(x.shape, x.dtype, 0) for name, x in plain.items()})
    for piece in pieces:
        prepared = encoder.prepare(piece)
        assert prepared is piece, "the torch body encoded"
        first, last = start // SEGMENT, -(-(start + piece.shape[2]) // SEGMENT)
        source = ListSource(tuple(segments[first:last]), SEGMENT)
        encoder.write(prepared, source, start - first * SEGMENT)
        start += piece.shape[2]
    guards.check()
    return segments


def native_encoder(codec) -> CpuEncoder:
    """Return the native encoder of a codec that it covers."""
    assert CPU.covers("encode", codec, torch.float32) == ""
    return CpuEncoder(library(), codec)


def compare(
    spec: str, side: str, pieces: list[torch.Tensor], start: int = 0, encoder=native_encoder
) -> str:
    """Return what differs between an encoder's slots of pieces and torch's of the whole."""
    codec = codec_of(spec, side, pieces[0].shape[3], pieces[0].dtype)
    expected = torch_slots(codec, torch.cat(pieces, 2), start)
    found = encoded_slots(encoder(codec), codec, pieces, start)
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        for name in a:
            left, right = (t.contiguous().view(torch.uint8) for t in (a[name], b[name]))
            if not torch.equal(left, right):
                return f"{name} of segment {index}: {int((left != right).sum())} bytes"
    return ""


def check_gaps(encoder, codec) -> None:
    """Slots with gaps between them are refused, and nothing is written."""
    gaps = {f.name: f.allocate(1, 1, 256, torch.device("cpu"))[:, :, ::2] for f in codec.fields}
    with pytest.raises(GeometryError, match="gaps"):
        encoder.write(torch.ones(1, 1, 1, 64), ListSource((gaps,), 128), 0)
    assert not any(storage.any() for storage in gaps.values())


def random_pieces(
    spec: str, side: str, dim: int, count: int, start: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[torch.Tensor], int]:
    """Return tokens (whole groups of the codec) and where they begin."""
    group = codec_of(spec, side, dim, dtype).group
    count, start = -(-count // group) * group, start // group * group
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, count, dim, generator=generator).to(dtype)], start


def treated_pieces(
    spec: str, side: str, dim: int, count: int, start: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[torch.Tensor], int]:
    """Return tokens as of `random_pieces` that are near a mean, near the first one, or neither."""
    (x,), start = random_pieces(spec, side, dim, count, start, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    mean, first = 4 * torch.randn(2, 1, 3, 1, dim, generator=generator)
    sizes = torch.rand(dim, generator=generator) + 0.1
    place = torch.arange(x.shape[2]).view(-1, 1)
    base = torch.where(place % 5 == 0, first, torch.where(place % 7 == 3, torch.zeros(()), mean))
    return [(base + x * sizes).to(dtype)], start


def trellis_cases() -> list[tuple[str, str, int, int, int, torch.dtype]]:
    """Return a spec, side, width and place for each of some comparisons of trellises."""
    found, turns = [], itertools.cycle(itertools.product((64, 80, 128, 256), PLACES))
    for spec in TRELLISES:
        sides = "kv" if _PLAIN in spec else "k"
        found += [
            (spec, side, width, *place)
            for side in sides
            for width, place in itertools.islice(turns, 3)
        ]
    plain = [spec for spec in TRELLISES if _PLAIN in spec]
    # Words of V hold tokens, so any width fills them.
    return found + [(spec, "v", 33, *PLACES[2]) for spec in plain]


def cases() -> list[tuple[str, str, int, int, int, torch.dtype]]:
    """Return all formats, sides, widths and places, though not all of them at once."""
    places = itertools.cycle(PLACES)
    return [
        (spec, side, dim, *place)
        for spec, dim, side in itertools.product(FORMATS, (20, 33, *WIDTHS), "kv")
        for place in itertools.islice(places, 2 if dim > 80 else 5)
    ]
