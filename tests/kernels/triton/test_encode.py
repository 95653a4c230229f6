"""Encoding by the Triton kernels gives the torch body's bytes."""

import itertools

import encode_compare
import pytest
import torch
from forms import one_per_form, slow
from host_reads import HostReads

pytest.importorskip("triton")

from kvpact.errors import NonFiniteError
from kvpact.kernels import ListSource
from kvpact.kernels.triton.encode.encoder import TritonEncoder
from kvpact.kernels.triton.forms import slots_of
from kvpact.quantizers.checks import collected, deferred

COVERED = [spec for spec in encode_compare.FORMATS if not spec.startswith("kvarn")]
NARROW = (64, 20, 33, 80, 3)


def encoder(codec) -> TritonEncoder:
    assert slots_of(codec, torch.device("cpu")).encode_reason == ""
    return TritonEncoder(codec)


@pytest.mark.parametrize(("spec", "side", "dim", "count", "start", "dtype"), one_per_form([
    (spec, side, dim, *place)
    for (spec, side), dim, place in zip(
        itertools.product(COVERED, "kv"),
        itertools.cycle(NARROW),
        itertools.cycle(encode_compare.PLACES[:5]),
        strict=False,
    )
]))  # fmt: skip
def test_every_format(spec, side, dim, count, start, dtype):
    (tokens,), start = encode_compare.random_pieces(spec, side, dim, count, start, dtype)
    assert encode_compare.compare(spec, side, [tokens[:1, :2]], start, encoder=encoder) == ""


def test_rows_and_heads():
    for spec, side in (("turboquant:bits=4", "k"), ("int:bits=4,zero=true", "v")):
        tokens = encode_compare.random_pieces(spec, side, 64, 33, 5, torch.float16)
        assert encode_compare.compare(spec, side, *tokens, encoder=encoder) == ""


@pytest.mark.slow
@pytest.mark.parametrize("spec", COVERED)
def test_every_format_at_every_width(spec):
    places = itertools.cycle(encode_compare.PLACES)
    for dim, side in itertools.product((1, 20, 33, *encode_compare.WIDTHS, 1000, 1024), "kv"):
        for place in itertools.islice(places, 4):
            tokens = encode_compare.random_pieces(spec, side, dim, *place)
            found = encode_compare.compare(spec, side, *tokens, encoder=encoder)
            assert found == "", (dim, side, place)


@pytest.mark.parametrize(("spec", "side", "counts", "start"), [
    ("turboquant:bits=5", "k", [1, 36, 1], 127),
    ("int:bits=6,zero=true", "v", [1, 32, 7], 100),
    ("turboquant:bits=4,center=64", "k", [64, 64], 64),
    *slow(
        ("turboquant:bits=3", "v", [1, 1, 30, 1, 33], 30),
        ("turboquant:bits=7", "v", [5, 40, 1], 90),
        ("int:bits=2", "v", [9, 1, 1, 40], 3),
        ("fp8", "v", [3, 1, 70], 61),
        ("kivi:bits=2", "k", [32, 96, 32], 96),
    ),
])  # fmt: skip
def test_pieces_are_the_whole(spec, side, counts, start):
    (tokens,), _ = encode_compare.random_pieces(spec, side, 36, sum(counts), start, torch.bfloat16)
    pieces = list(tokens[:1, 1:].split(counts, 2))
    assert encode_compare.compare(spec, side, pieces, start, encoder=encoder) == ""


SPECIAL_CASES = (
    ("turboquant:bits=4", "k"), ("int:bits=8", "v"), ("int:bits=4,group=48", "k"),
    ("int:bits=6,zero=true", "v"), ("fp8", "k"), ("kivi:bits=4,group=64", "k"),
    ("turboquant:bits=3,scale=unbiased", "v"), ("turboquant:bits=2,center=128,scale=l2", "k"),
    ("int:bits=3,zero=true,rotate=true", "v"), ("fp8:scale=none,format=e5m2", "v"),
)  # fmt: skip


@pytest.mark.parametrize(("spec", "side"), [
    *SPECIAL_CASES[:6],
    *slow(*SPECIAL_CASES[6:], *((spec, "v" if x == "k" else "k") for spec, x in SPECIAL_CASES)),
])  # fmt: skip
def test_special_values(spec, side):
    """Zeros of both signs, subnormal and tiny numbers, ties, large numbers beside small ones."""
    group = encode_compare.codec_of(spec, side, 64, torch.float32).group
    generator = torch.Generator().manual_seed(1)
    for dtype in encode_compare.DTYPES:
        values = torch.tensor(encode_compare.SPECIAL).to(dtype)
        shape = (1, 1, -(-40 // group) * group, 64)
        tokens = values[torch.randint(len(encode_compare.SPECIAL), shape, generator=generator)]
        for i, value in enumerate(values):
            tokens[0, 0, i] = value  # a token of one number
        assert encode_compare.compare(spec, side, [tokens], encoder=encoder) == ""


@pytest.mark.parametrize(
    "spec", ["int:bits=8", "int:bits=4", "kivi:bits=4", "int:bits=4,zero=true"]
)
def test_ties(spec):
    codes = torch.arange(-128, 128).repeat(32, 1)[None, None]
    for halves in (codes / 2, codes + 0.5):
        assert encode_compare.compare(spec, "k", [halves.float()], encoder=encoder) == ""


def test_views():
    """Transposed, sliced, unaligned and expanded tokens."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(1, 32, 4, 35, generator=generator)
    for view in (
        wide.transpose(1, 2)[:, 1:3, :, 3:],
        wide.permute(0, 3, 1, 2)[:, :3],
        wide[:, :, :, 1:33].expand(2, -1, -1, -1).transpose(1, 2)[:, ::2],
    ):
        for spec, side in (("turboquant:bits=4", "v"), ("kivi:bits=2", "k")):
            assert encode_compare.compare(spec, side, [view], encoder=encoder) == "", view.stride()


REFUSED = [
    ("turboquant:bits=4", 1e6),
    ("int:bits=8", 1e8),
    ("int:bits=4,zero=true,rotate=true", 1e5),
    ("fp8", 1e8),
    ("fp8:scale=none", 500.0),
    ("kivi:bits=2", -1e5),
    *((spec, bad) for spec in ("int:bits=8", "fp8") for bad in (torch.nan, torch.inf)),
]


def tokens_with(spec: str, number: float) -> tuple[object, torch.Tensor]:
    """Return a codec of K, and tokens of which one has a number."""
    tokens = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(3))
    tokens[0, 1, 33] = number
    return encode_compare.codec_of(spec, "k", 64, torch.float32), tokens


@pytest.mark.parametrize(("spec", "number"), REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(spec, number):
    codec, tokens = tokens_with(spec, number)
    with pytest.raises(NonFiniteError) as expected:
        codec.encode(tokens)
    with pytest.raises(NonFiniteError) as found:
        encoder(codec).prepare(tokens)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(("spec", "number"), [*REFUSED, ("turboquant:bits=4", 1.0)])
def test_deferred_checks_leave_a_flag_and_the_host_waits_for_nothing(spec, number):
    codec, tokens = tokens_with(spec, number)
    with deferred() as flags, HostReads() as reads:
        assert encoder(codec).prepare(tokens) is tokens
        assert len(flags) == 1
        good = collected()
    assert not reads.counts
    assert bool(good) == (number == 1.0)


@pytest.mark.parametrize(("spec", "size"), [
    ("turboquant:bits=4", 60_000.0),
    ("int:bits=8", 8.3e6),
    ("int:bits=4,zero=true,rotate=true", 9_000.0),
    ("fp8", 2.91e7),
])  # fmt: skip
def test_tokens_that_are_beyond_the_limit_and_fit_are_encoded(spec, size):
    """The limit is what surely fits: beyond it, what is stored decides."""
    codec = encode_compare.codec_of(spec, "k", 64, torch.float32)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randn(1, 2, 33, 64, generator=generator)
    tokens[0, 1, 7, 5] = size
    assert size > codec.form.limit
    assert encode_compare.compare(spec, "k", [tokens], encoder=encoder) == ""


def test_slots_with_gaps_are_refused_before_anything_is_written():
    codec = encode_compare.codec_of("turboquant:bits=4", "k", 64, torch.float32)
    encode_compare.check_gaps(encoder(codec), codec)


@pytest.mark.parametrize(("spec", "dim", "reason"), [
    ("qjl", 64, "no native encoding for SignCodec"),
    ("turboquant:bits=3,mode=prod", 64, "no native encoding for TurboQuantCodec"),
    ("trellis:bits=4", 4, "trellises of less than 8 channels"),
    ("kvarn:bits=4", 64, "tokens and channels of a group are balanced"),
    ("fp8", 2048, "width 2048 is above 1024"),
])  # fmt: skip
def test_what_is_not_covered_says_why(spec, dim, reason):
    codec = encode_compare.codec_of(spec, "k", dim, torch.float32)
    assert slots_of(codec, torch.device("cpu")).encode_reason == reason


def test_appends_to_the_same_segments_make_no_new_table():
    codec = encode_compare.codec_of("turboquant:bits=4", "k", 64, torch.float32)
    tokens, own, tables = torch.ones(1, 1, 129, 64), encoder(codec), []
    sources = [ListSource((x,), 128) for x in encode_compare.encoded_slots(own, codec, [tokens], 0)]
    for source in (sources[0], *sources):
        own.write(tokens[:, :, :1], source, 0)
        tables.append(source.prepared["triton:1"])
    assert tables[0] is tables[1] is not tables[2]
