"""Encoding by the native kernel gives the torch body's bytes, at every SIMD level."""

import itertools

import pytest
import torch
from encode_compare import (
    DTYPES,
    FORMATS,
    SPECIAL,
    TRELLISES,
    WIDTHS,
    cases,
    check_gaps,
    codec_of,
    compare,
    encoded_slots,
    native_encoder,
    random_pieces,
    treated_pieces,
    trellis_cases,
)
from hypothesis import assume
from hypothesis import strategies as st
from random_cases import random_cases
from simd_levels import at_level, each_half, levels

from kvpact import CacheGeometry, create_cache
from kvpact.arithmetic import square_root
from kvpact.errors import NonFiniteError
from kvpact.kernels.cpu import library
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import CodecEncoder, CpuEncoder, magnitudes, search_tree
from kvpact.kernels.cpu.library import NativeLibrary, _load
from kvpact.quantizers import uniform

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@each_half
@pytest.mark.parametrize("level", levels())
def test_every_format_at_every_level(level, half):
    with at_level(level):
        for case in cases()[half::2]:
            assert compare(*case[:2], *random_pieces(*case)) == "", case
        for case in trellis_cases()[half::2]:
            assert compare(*case[:2], *treated_pieces(*case)) == "", case


@pytest.mark.parametrize("spec", (*FORMATS, "trellis:bits=3", "trellis:bits=6,states=8"))
def test_special_values(spec):
    """Zeros of both signs, subnormal and tiny numbers, ties, large numbers beside small ones."""
    generator = torch.Generator().manual_seed(1)
    for side, dtype in itertools.product("kv", DTYPES):
        group = codec_of(spec, side, 64, torch.float32).group
        values, count = torch.tensor(SPECIAL).to(dtype), -(-96 // group) * group
        tokens = values[torch.randint(len(SPECIAL), (1, 2, count, 64), generator=generator)]
        for i, value in enumerate(values):
            tokens[0, 0, i] = value  # a token of one number
        tokens[0, 1, ::2] *= values.abs()[6].to(dtype)
        assert compare(spec, side, [tokens]) == "", (side, dtype)


@pytest.mark.parametrize(
    "spec", ("int:bits=8", "int:bits=4", "kivi:bits=4", "int:bits=4,zero=true")
)
def test_ties(spec):
    codes = torch.arange(-128, 128).repeat(32, 1)[None, None]
    for halves in (codes / 2, codes + 0.5, codes * 0.25):
        assert compare(spec, "k", [halves.float()]) == ""
        assert compare(spec, "v", [halves.float()]) == ""


@random_cases(
    50,
    st.sampled_from(FORMATS) | st.sampled_from(TRELLISES),
    st.sampled_from("kv"),
    st.integers(1, 70) | st.sampled_from(WIDTHS),
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(0, 130),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
    st.sampled_from((1.0, 1e-6, 1e-3, 50.0)),
)
def test_any_pieces_are_the_whole(spec, side, dim, counts, start, dtype, seed, size):
    make = random_pieces
    if spec in TRELLISES:  # torch's search takes its time
        make, dim, counts = treated_pieces, 16 * (dim % 9 + 1), [n % 40 + 1 for n in counts[:3]]
    codec = codec_of(spec, side, dim, dtype)
    assume(not CodecEncoder.of(codec).reason)
    counts = [-(-count // codec.group) * codec.group for count in counts]
    (tokens,), start = make(spec, side, dim, sum(counts), start, dtype, seed)
    # Beyond the limit torch encodes.
    limit = min(CodecEncoder.of(codec).limit, torch.finfo(dtype).max) * 0.99
    tokens = (tokens * size).clamp(-limit, limit)
    assert compare(spec, side, list(tokens.split(counts, 2)), start) == ""


def test_bases_of_every_kind_are_found():
    """What the comparisons rest on: their tokens have a mean, a first key, and neither."""
    codec = codec_of("trellis:bits=4", "k", 64, torch.float32)
    (tokens,), _ = treated_pieces("trellis:bits=4", "k", 64, 128, 0, torch.float32)
    fitted = codec.fit(tokens)
    segments = encoded_slots(native_encoder(fitted), fitted, [tokens], 0)
    base = next(field for field in codec.fields if field.name == "base")
    assert torch.bincount(base.read(segments[0]["base"]).flatten()).min() > 50


@pytest.mark.parametrize(("spec", "dim", "reason"), (
    ("trellis:bits=4", 20, "trellises of 20 channels, whose codes of 4 bits fill no words"),
    ("trellis:bits=2,blocks=false", 4, "trellises of 4 channels"),
))  # fmt: skip
def test_trellises_without_whole_words_are_not_covered(spec, dim, reason):
    codec = codec_of(spec, "k", dim, torch.float32)
    assert CPU.covers("encode", codec, torch.float32) == reason


def test_what_a_trellis_learns_from_is_encoded_by_torch():
    codec = codec_of("trellis:bits=4", "k", 64, torch.float32)
    tokens = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(9))
    assert CPU.covers("encode", codec, torch.float32) == ""
    assert isinstance(CpuEncoder(library(), codec).prepare(tokens), dict)


@pytest.mark.parametrize(
    "spec", ("turboquant:bits=4", "int:bits=8", "fp8", "kivi:bits=2", "kvarn:bits=3")
)
def test_views(spec):
    """Transposed, sliced, unaligned and expanded tokens."""
    generator = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        wide = torch.randn(2, 64, 4, 83, generator=generator).to(dtype)
        views = [
            wide.transpose(1, 2)[:, 1:3, :, 3:],
            wide.permute(0, 3, 1, 2)[:, :3, :, :].permute(0, 1, 2, 3),
            wide[:1, :, :, 1:65].expand(3, -1, -1, -1).transpose(1, 2)[:, ::2],
            wide[..., ::2].transpose(1, 2),
        ]
        for view in views:
            assert compare(spec, "k", [view]) == "", view.stride()
            assert compare(spec, "v", [view]) == "", view.stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitude(dtype):
    generator = torch.Generator().manual_seed(3)
    for count in (1, 7, 100):
        x = torch.randn(2, 3, count, 37, generator=generator).to(dtype)
        for view in (x, x[..., 1:], x.transpose(1, 2), x[:, :, :, ::3], x * 1e-39):
            assert magnitudes(library(), (view,))[0] == float(view.abs().max())
        for wrong in (torch.inf, -torch.inf, torch.nan):
            x[1, 2, count - 1, 36] = wrong
            assert not magnitudes(library(), (x,))[0] < torch.inf


def test_numbers_beyond_the_format_are_refused_as_by_torch():
    geometry = CacheGeometry(1, 2, 64, None, torch.float32)
    for spec, size in (("turboquant:bits=4", 1e6), ("int:bits=8", 1e8), ("fp8:scale=none", 500.0)):
        messages = []
        for kernel in ("torch", "cpu"):
            cache = create_cache(spec, geometry, backend=kernel)
            with pytest.raises(NonFiniteError) as caught:
                cache.prefill(0, *torch.full((2, 1, 2, 5, 64), size))
            messages.append(str(caught.value))
            assert cache.seq_len(0) == 0
        assert messages[0] == messages[1]


def test_what_the_kernel_can_not_take_raises_before_it_is_called():
    codec = codec_of("turboquant:bits=4", "k", 64, torch.float32)
    assert "dtype" in CPU.covers("encode", codec, torch.float64)
    wide = codec_of("fp8", "k", 2048, torch.float32)
    assert "width" in CPU.covers("encode", wide, torch.float32)
    check_gaps(CpuEncoder(library(), codec), codec)


def test_square_roots_are_correctly_rounded():
    """torch's own may be a last bit off, on some processors, and so would stored bytes be."""
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(7)) * 1000
    y = square_root(x)
    for number, root in zip(x[:200].tolist(), y[:200].tolist(), strict=True):
        middle = [
            (root + float(torch.tensor(root).nextafter(torch.tensor(e)))) / 2 for e in (0.0, 1e9)
        ]
        assert middle[0] ** 2 <= number <= middle[1] ** 2
    assert square_root(torch.tensor([602.577880859375])).item() == 24.547462463378906


def test_the_least_zero_has_no_sign():
    scale, zero = uniform.affine_grid(torch.tensor([[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]]), 4)
    assert zero.view(torch.int16).tolist() == [[0], [0], [0]]
    assert scale.tolist() == [[0.0]] * 3


def test_tiny_numbers_have_codes_of_zero():
    codes, scale = uniform.quantize_symmetric(torch.tensor([[1e-44, -1e-38, 1e-39]]), 8)
    assert codes.tolist() == [[128, 128, 128]] and scale.item() == 0.0


@pytest.mark.parametrize("spec", (*FORMATS, TRELLISES[0]))
def test_what_the_limit_lets_pass_fits_every_field(spec):
    """Tokens in one channel, in one rotated channel, and of both signs at random."""
    for dim in (33, 64, 128, 576):
        codec = codec_of(spec, "k", dim, torch.float32)
        limit = 0.9999 * CodecEncoder.of(codec).limit
        if limit == torch.inf or codec.group > 1:
            pytest.skip("the codec's own check_range says what fits")
        one = torch.eye(dim)[None, None] * limit
        rotated = codec.transform.inverse(one)
        generator = torch.Generator().manual_seed(8)
        signs = torch.randint(0, 2, (1, 1, 64, dim), generator=generator) * 2.0 - 1.0
        for x in (one, rotated * (limit / rotated.abs().max()), signs * limit):
            assert all(values.isfinite().all() for values in codec.encode(x).values())


EVEN = tuple(i / 4 for i in range(-7, 8))


@pytest.mark.parametrize("boundaries", [EVEN, tuple(x**3 for x in EVEN)], ids=["even", "crowded"])
def test_levels_agree_on_numbers_at_boundaries_however_these_lie(boundaries):
    codec = codec_of("turboquant:bits=4", "k", 64, torch.float32)
    # Tokens of one channel become 1 and -1 in all channels, which are boundaries.
    x = torch.cat([torch.eye(64), torch.randn(64, 64, generator=torch.Generator().manual_seed(3))])
    pieces = [x.view(1, 2, 64, 64)]
    (usual,) = encoded_slots(native_encoder(codec), codec, pieces, 0)
    steps = torch.tensor(search_tree(boundaries))
    CodecEncoder.of(codec).args.steps = steps.data_ptr()
    found = []
    for level in library().levels:
        encoder = CpuEncoder(NativeLibrary(library().path, [level]), codec)
        (slots,) = encoded_slots(encoder, codec, pieces, 0)
        found.append(slots["codes"])
    assert not torch.equal(found[0], usual["codes"])
    assert all(torch.equal(found[0], codes) for codes in found)
