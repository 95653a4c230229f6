"""Slots by an encoder against those of the torch body; a script for other SIMD levels."""

from __future__ import annotations

import itertools
import json

import torch

from kvpact import parse_spec
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import CpuEncoder

FORMATS = (
    *(f"turboquant:bits={bits}" for bits in range(1, 9)),
    "turboquant:bits=4,scale=l2,seed=5",
    "turboquant:bits=3,scale=unbiased",
    "turboquant:bits=4,center=64",
    "turboquant:bits=2,center=128,scale=l2",
    *(f"int:bits={bits}" for bits in range(2, 9)),
    "int:bits=4,group=48",
    "int:bits=6,zero=true",
    "int:bits=8,zero=true,group=64",
    "int:bits=4,group=64,rotate=true",
    "int:bits=3,zero=true,rotate=true",
    "fp8",
    "fp8:format=e5m2",
    "fp8:scale=none",
    "fp8:scale=none,format=e5m2",
    "kivi:bits=2",
    "kivi:bits=4,group=64",
    "kivi:bits=3,group=128",
    "kvarn:bits=4",
    "kvarn:bits=2,group=32",
    "kvarn:bits=3,group=128",
    "kvarn:bits=8,group=32,seed=3",
)
_PLAIN = "center=0,first=false,weights=false,blocks=false"
TRELLISES = (
    *(f"trellis:bits={bits},{_PLAIN}" for bits in range(1, 7)),
    *(f"trellis:bits={bits}" for bits in range(1, 7)),
    f"trellis:bits=4,states=8,seed=3,{_PLAIN}",
    "trellis:bits=3,states=8",
    "trellis:bits=4,center=128",
    "trellis:bits=3,center=0",
    "trellis:bits=4,center=0,first=false",
    "trellis:bits=2,weights=false,blocks=false,first=false",
    "trellis:bits=4,weights=false,blocks=false",
    "trellis:bits=5,blocks=false",
    "trellis:bits=2,weights=false,seed=4",
)
"""Compared at fewer places than `FORMATS`: torch's search through a trellis takes its time."""
WIDTHS = (64, 80, 96, 128, 256, 576)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = (
    (1, 0, torch.float32),
    (1, 37, torch.float16),
    (3, 30, torch.bfloat16),
    (31, 0, torch.float32),
    (33, 5, torch.float16),
    (140, 100, torch.bfloat16),
)
"""How many tokens, the position of the first, and their dtype."""

GUARD = 64
SEGMENT = 128


def codec_of(spec: str, side: str, dim: int, dtype: torch.dtype):
    method = parse_spec(spec).key
    return (method.key_codec if side == "k" else method.value_codec)(dim, dtype)


def guarded(field, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeroed storage of a segment, and the memory around it, which holds guards."""
    plain = field.allocate(batch, heads, SEGMENT, torch.device("cpu"))
    whole = torch.full((plain.numel() + 2 * GUARD,), 85).to(plain.dtype)
    storage = whole[GUARD:-GUARD].view(plain.shape).zero_()
    return storage, whole


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
) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Return the segments after an encoder took pieces in turn, and the guarded memory."""
    batch, heads = pieces[0].shape[:2]
    total = start + sum(piece.shape[2] for piece in pieces)
    segments, memory = [], []
    for _ in range(-(-total // SEGMENT)):
        made = {f.name: guarded(f, batch, heads) for f in codec.fields}
        segments.append({name: storage for name, (storage, _) in made.items()})
        memory += [whole for _, whole in made.values()]
    for piece in pieces:
        prepared = encoder.prepare(piece)
        assert prepared is piece, "the torch body encoded"
        first, last = start // SEGMENT, -(-(start + piece.shape[2]) // SEGMENT)
        encoder.write(prepared, segments[first:last], SEGMENT, start - first * SEGMENT)
        start += piece.shape[2]
    return segments, memory


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
    found, memory = encoded_slots(encoder(codec), codec, pieces, start)
    for whole in memory:
        wanted = torch.tensor(85).to(whole.dtype)
        if not ((whole[:GUARD] == wanted).all() and (whole[-GUARD:] == wanted).all()):
            return "guards overwritten"
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        for name in a:
            left, right = (t.contiguous().view(torch.uint8) for t in (a[name], b[name]))
            if not torch.equal(left, right):
                return f"{name} of segment {index}: {int((left != right).sum())} bytes"
    return ""


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


def main() -> None:
    """Compare all formats, sides, widths and dtypes at this process's level; print a line."""
    bad = []
    cases = [
        (spec, side, dim, *place)
        for spec, dim, side, place in itertools.product(FORMATS, (20, 33, *WIDTHS), "kv", PLACES)
    ]
    trellises = trellis_cases()
    for case in (*cases, *trellises):
        make = treated_pieces if case in trellises else random_pieces
        difference = compare(*case[:2], *make(*case))
        if difference:
            bad.append((*case[:-1], str(case[-1]), difference))
    found = {"level": library().level, "cases": len(cases), "trellises": len(trellises)}
    print(json.dumps({**found, "bad": bad}))


if __name__ == "__main__":
    main()
