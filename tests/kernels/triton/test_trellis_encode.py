"""Encoding of trellises by the Triton kernels gives the torch body's bytes."""

import pytest
import torch
from encode_compare import (
    _PLAIN,
    SEGMENT,
    codec_of,
    compare,
    random_pieces,
    torch_slots,
    treated_pieces,
    trellis_cases,
)
from forms import slow
from host_reads import HostReads

pytest.importorskip("triton")

from kvpact.errors import NonFiniteError
from kvpact.kernels import ListSource
from kvpact.kernels.triton.encode import encoder as encoding
from kvpact.kernels.triton.encode.encoder import TritonEncoder
from kvpact.kernels.triton.forms import SlotPlaces, slots_of
from kvpact.quantizers.checks import collected, deferred
from kvpact.testing.held import same_bytes

V3 = f"trellis:bits=3,{_PLAIN}"


def encoder(codec) -> TritonEncoder:
    assert slots_of(codec, torch.device("cpu")).encode_reason == ""
    return TritonEncoder(codec)


@pytest.mark.parametrize(("spec", "side", "dim", "count", "start", "dtype"), [
    ("trellis:bits=3", "k", 64, 64, 64, torch.bfloat16),
    *slow(("trellis:bits=5,center=0", "k", 64, 5, 30, torch.float16)),
    ("trellis:bits=2,weights=false,blocks=false", "k", 36, 64, 0, torch.float32),
    (f"trellis:bits=1,{_PLAIN}", "k", 32, 3, 31, torch.float32),
    (f"trellis:bits=4,states=8,{_PLAIN}", "k", 16, 3, 30, torch.float32),
    (f"trellis:bits=6,{_PLAIN}", "v", 20, 7, 60, torch.bfloat16),
    (V3, "v", 33, 40, 100, torch.float16),
])  # fmt: skip
def test_bytes(spec, side, dim, count, start, dtype):
    (x,), _ = treated_pieces(spec, side, dim, count, 0, dtype)
    x = x[:1, :1, :count]
    x[0, 0, 1] = 0
    assert compare(spec, side, [x], start, encoder=encoder) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", trellis_cases(), ids=lambda case: f"{case[0]} {case[1:5]}")
def test_every_format(case):
    spec, side, dim, count, start, dtype = case
    (x,), start = treated_pieces(spec, side, dim, count, start, dtype)
    assert compare(spec, side, [x[:1, :2]], start, encoder=encoder) == ""


def test_pieces_are_the_whole(monkeypatch):
    """Appended in pieces, and encoded in pieces that end where tiles do."""
    (x,), _ = random_pieces(V3, "v", 8, 41, 0, torch.float32)
    monkeypatch.setattr(encoding, "_AT_A_TIME", 1)
    assert compare(V3, "v", list(x[:1, :1].split([5, 35, 1], 2)), 30, encoder=encoder) == ""


def test_rows_heads_and_views():
    view = torch.randn(5, 2, 20, 2, generator=torch.Generator().manual_seed(1)).permute(1, 3, 0, 2)
    assert compare(V3, "v", [view[..., 3:11]], 90, encoder=encoder) == ""


def test_tokens_behind_what_only_the_device_knows():
    """Rows of unlike lengths, each at its own place."""
    codec = codec_of(V3, "v", 8, torch.float32)
    tokens = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(2))
    place = (2, 1, SEGMENT, torch.device("cpu"))
    segments = [{f.name: f.allocate(*place) for f in codec.fields} for _ in range(2)]
    held, tables = (127, 30), slots_of(codec, tokens.device)
    slots = SlotPlaces.of(tables.known, [ListSource(tuple(segments), SEGMENT)], 2, tokens.device)
    form, counts = tables.known, torch.tensor([[n, 7] for n in held])
    encoding.encode_trellis(codec, form, tokens, slots, 0, counts)
    for row, count in enumerate(held):
        expected = torch_slots(codec, tokens[row : row + 1], count)
        for wanted, found in zip(expected, segments, strict=False):
            for name in wanted:
                assert same_bytes(wanted[name][0], found[name][row])


def test_a_codec_that_has_not_learnt_learns_in_torch():
    codec = codec_of("trellis:bits=4", "k", 64, torch.float32)
    (x,), _ = random_pieces("trellis:bits=4", "k", 64, 64, 0, torch.float32)
    assert isinstance(encoder(codec).prepare(x), dict) and codec.ready
    assert encoder(codec).prepare(x) is x


@pytest.mark.parametrize("number", (64_000.0, torch.nan))
def test_what_torch_refuses_is_refused(number):
    codec, x = codec_of(V3, "v", 8, torch.float32), torch.ones(1, 1, 3, 8)
    x[0, 0, 1] = number
    with pytest.raises(NonFiniteError, match="beyond"):
        encoder(codec).prepare(x)
    with deferred() as flags, HostReads() as reads:
        assert encoder(codec).prepare(x) is x and len(flags) == 1
        assert not reads.counts
        good = collected()
    assert not bool(good)


def test_the_host_waits_for_nothing():
    codec, x = codec_of(V3, "v", 8, torch.float32), torch.ones(1, 1, 1, 8)
    segment = {f.name: f.allocate(1, 1, 32, torch.device("cpu")) for f in codec.fields}
    own, source = encoder(codec), ListSource((segment,), 32)
    own.write(x, source, 0)  # which makes the tables
    with HostReads() as reads:
        own.write(x, source, 1)
    assert not reads.counts
