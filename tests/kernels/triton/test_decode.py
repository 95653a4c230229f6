"""Decoding by the Triton kernel gives the torch body's numbers, bit by bit."""

import itertools

import pytest
import torch
from decode_compare import FORMATS, PLACES, Slots, check_refusals, compare_slots, numbers, packed
from encode_compare import _PLAIN, DTYPES, SPECIAL, TRELLISES, random_pieces, treated_pieces
from forms import one_per_form

pytest.importorskip("triton")

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.kernels.torch.slots import decode_slots
from kvpact.kernels.triton.decode.kernel import decode_triton
from kvpact.testing.data import by_name

NARROW = (64, 20, 33, 80, 1, 3, 96)
PLAIN_TRELLISES = [spec for spec in TRELLISES if _PLAIN in spec]
TREATED = [spec for spec in TRELLISES if _PLAIN not in spec]


def slots_of_random_tokens(spec: str, side: str, dim: int, tokens: int = 150):
    (x,), _ = random_pieces(spec, side, dim, tokens, 0, torch.float32)
    return packed(spec, side, x[:1])


def differences(
    spec: str, side: str, dim: int, start: int, end: int, dtype: torch.dtype
) -> list[str]:
    """Return what differs, rotated back or not."""
    codec, store = slots_of_random_tokens(spec, side, dim)
    given = (codec, store, start, end, dtype)
    found = [compare_slots(*given, inverse, decode_triton) for inverse in (True, False)]
    return [text for text in found if text]


@pytest.mark.parametrize(("spec", "side", "dim", "start", "end", "dtype"), one_per_form([
    (spec, side, dim, *place, dtype)
    for (spec, side), dim, place, dtype in zip(
        itertools.product(FORMATS, "kv"),
        itertools.cycle(NARROW),
        itertools.cycle(((0, 1), (37, 70), (30, 33), (120, 150))),
        itertools.cycle(DTYPES),
        strict=False,
    )
]))  # fmt: skip
def test_every_format(spec, side, dim, start, end, dtype):
    assert differences(spec, side, dim, start, end, dtype) == []


@pytest.mark.parametrize(
    ("spec", "dim"), one_per_form(zip(PLAIN_TRELLISES, itertools.cycle((20, 64)), strict=False))
)
def test_values_of_trellises(spec, dim):
    assert differences(spec, "v", dim, 20, 50, torch.float32) == []


def difference_of_treated(spec: str, dim: int, start: int, end: int, dtype: torch.dtype) -> str:
    """Return what differs of keys that a trellis treats."""
    (x,), _ = treated_pieces(spec, "k", dim, 128, 0, torch.float32)
    return compare_slots(*packed(spec, "k", x[:1]), start, end, dtype, True, decode_triton)


@pytest.mark.parametrize(("spec", "dim", "dtype"), [
    (TREATED[0], 64, torch.float32),
    (TREATED[3], 80, torch.float16),
    ("trellis:bits=2,weights=false,blocks=false,first=false", 128, torch.bfloat16),
])  # fmt: skip
def test_treated_keys(spec, dim, dtype):
    assert difference_of_treated(spec, dim, 20, 60, dtype) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dim"), list(zip(TREATED, itertools.cycle((96, 128, 64, 20, 256, 80)), strict=False))
)
def test_every_treatment_and_width(spec, dim):
    for (start, end), dtype in itertools.product(((0, 1), (31, 128)), DTYPES):
        assert difference_of_treated(spec, dim, start, end, dtype) == ""


@pytest.mark.parametrize(("spec", "dim"), (("turboquant:bits=3", 576), ("kvarn:bits=5", 256)))
@pytest.mark.parametrize("side", "kv")
def test_wide_vectors(spec, side, dim):
    assert differences(spec, side, dim, 30, 35, torch.bfloat16) == []


@pytest.mark.slow
@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("dim", (5, 96, 256))
@pytest.mark.parametrize("spec", FORMATS)
def test_every_format_width_and_part(spec, dim, side):
    codec, store = slots_of_random_tokens(spec, side, dim)
    for (start, end), dtype in zip(PLACES, DTYPES * 2, strict=True):
        for inverse in (True, False):
            assert compare_slots(codec, store, start, end, dtype, inverse, decode_triton) == ""


@pytest.mark.parametrize("spec", ("turboquant:bits=4", "int:bits=8", "fp8", "kvarn:bits=3", "none"))
def test_special_values(spec):
    """Zeros of both signs, subnormal and tiny numbers, and fp16's largest."""
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(len(SPECIAL), (1, 1, 64, 64), generator=generator)
    tokens = torch.tensor(SPECIAL)[index]
    for side, dtype in itertools.product("kv", DTYPES):
        codec, store = packed(spec, side, tokens)
        assert compare_slots(codec, store, 0, 64, dtype, True, decode_triton) == ""


@pytest.mark.parametrize("format", ("e4m3", "e5m2"))
def test_all_numbers_of_8_bits(format):
    codec, store = slots_of_random_tokens(f"fp8:scale=none,format={format}", "k", 16, 32)
    store.segment(0)["codes"][0, 0, 0] = torch.arange(512).view(16, 32)
    expected, out = numbers(codec, store, 0, 32, torch.float32, False), torch.empty(1, 3, 32, 16)
    decode_triton(Slots(codec, store.source()), 0, 32, out, False)
    assert torch.equal(expected.isnan(), out.isnan())
    # NaN has no bits of its own, zero has a sign.
    expected, out = (x.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0) for x in (expected, out))
    assert torch.equal(expected.view(torch.int32), out.view(torch.int32))


@pytest.mark.parametrize("spec", ("int:bits=2", "int:bits=4,zero=true", "none:dtype=fp32"))
def test_what_is_beyond_fp16_becomes_its_largest_number(spec):
    tokens = torch.full((1, 1, 32, 64), 65000.0)
    tokens[..., ::2] = -65500.0
    codec, store = packed(spec, "k", tokens if spec[0] == "i" else tokens * 3)
    assert compare_slots(codec, store, 0, 32, torch.float16, True, decode_triton) == ""


def compare_streams(streams) -> None:
    for stream in streams:
        slots = Slots(stream.codec, stream.store.source())
        expected, out = torch.full((2, *stream.tail.shape[:2], 70, 64), torch.nan)
        decode_slots(slots, 50, 120, expected, inverse=True)
        decode_triton(slots, 50, 120, out, True)
        assert torch.equal(expected, out)


def test_segments_of_a_batch():
    generator = torch.Generator().manual_seed(2)
    geometry = CacheGeometry(1, 2, 64, None, torch.float32)
    cache = create_cache("turboquant:bits=4,window=0/kivi:bits=2,window=0", geometry)
    for count in (70, 1, 90):
        cache.store(0, **by_name(*torch.randn(2, 2, 2, count, 64, generator=generator)))
    compare_streams(cache._layers[0].streams())


def test_pages():
    generator = torch.Generator().manual_seed(2)
    geometry = CacheGeometry(1, 2, 64, None, torch.float32)
    spec = "turboquant:bits=4,window=0/kivi:bits=2,window=0"
    cache = PagedKVCache(spec, geometry, num_pages=12, page_size=64)
    seqs = [cache.allocate() for _ in range(2)]
    for count in (70, 1, 90):
        tokens = torch.randn(2, 2, 2, count, 64, generator=generator)
        for seq, (k, v) in zip(seqs, tokens, strict=True):
            cache.append(0, {seq: (k, v)})
    for seq in seqs:
        compare_streams(cache.layer_of(seq, 0).streams())


def test_what_the_kernel_can_not_take_raises():
    check_refusals(decode_triton)
    codec, store = slots_of_random_tokens("turboquant:bits=4", "k", 64, 64)
    decode_triton(Slots(codec, store.source()), 5, 5, torch.empty(1, 3, 0, 64), True)
