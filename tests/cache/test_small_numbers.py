"""Numbers below what side information holds are stored as well as larger ones."""

import pytest
import torch
from tests.helpers.faults import same_state

import kvpact
from kvpact.cache.layer.states import layer_state, packed_part
from kvpact.errors import BackendUnavailable, FormatError, MismatchError, NonFiniteError
from kvpact.methods.scaled import NAME, ScaledCodec, scaled_as, scaled_for
from kvpact.testing import random_tokens

DIM, HEADS, TOKENS = 32, 2, 300
SHAPE = kvpact.CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
METHODS = [
    "int:bits=8", "int:bits=4,zero=true", "trellis:bits=4", "turboquant:bits=4", "kivi:bits=4",
    "kvarn", "fp8",
]  # fmt: skip
SIZES = (2.0**-14, 2.0**-16, 2.0**-20, 2.0**-24)


def given(size=1.0, side="v", dtype=torch.float32):
    k, v, q = (random_tokens(1, heads, TOKENS, DIM, seed=heads) for heads in (2, 2, 4))
    k, v = (k * size, v) if side == "k" else (k, v * size)
    return k.to(dtype), v.to(dtype), q.to(dtype)


def filled(spec, size=1.0, side="v", pieces=TOKENS, shape=SHAPE, **options):
    cache = kvpact.create_cache(spec, shape, **options)
    for k, v, q in zip(*(x.split(pieces, 2) for x in given(size, side, shape.dtype)), strict=True):
        cache.attend(0, k=k, v=v, q=q)
    return cache


def error(cache, size, side):
    x = given(size, side, SHAPE.dtype)[side == "v"]
    return float((cache.dequantize(0, side) - x).norm() / x.norm())


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_errors_are_those_of_numbers_of_size_1(spec, side):
    wanted = error(filled(spec), 1.0, side)
    assert 0 < wanted < 0.2
    for size in SIZES:
        assert error(filled(spec, size, side), size, side) == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("side", ["k", "v"])
def test_attention_is_that_over_what_is_held(side):
    size, (_, _, q) = 2.0**-20, given()
    small = filled("trellis:bits=4", size, side)
    k, v = small.dequantize(0, "k"), small.dequantize(0, "v")
    new = [x[:, :, :1] for x in given(size, side)[:2]]
    k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v, enable_gqa=True)
    found = small.attend(0, k=new[0], v=new[1], q=q[:, :, :1])
    torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)


def test_small_numbers_of_size_1_keep_their_bytes_and_zeros_their_codec():
    for size in (1.0, 2.0**-8, 0.0):
        assert not isinstance(filled("int:bits=8", size).entry(0).v.codec, ScaledCodec)
    assert isinstance(filled("int:bits=8", 2.0**-16).entry(0).v.codec, ScaledCodec)
    assert filled("none", 2.0**-20).entry(0).v.codec.state() == {}


@pytest.mark.parametrize("spec", ["int:bits=8", "trellis:bits=4", "kivi:bits=4"])
def test_pieces_forks_rows_rollbacks_and_snapshots_go_on_alike(spec):
    size = 2.0**-20
    whole, cache = filled(spec, size), filled(spec, size, pieces=100)
    other = kvpact.create_cache(spec, SHAPE)
    other.restore(cache.snapshot())
    for one in (cache.fork(), other):
        assert same_state(layer_state(one.entry(0)), layer_state(cache.entry(0)))
        assert one.entry(0).v.codec.power == cache.entry(0).v.codec.power > 10
    assert error(cache, size, "v") == pytest.approx(error(whole, size, "v"), rel=0.2)
    cache.truncate(200)
    cache.repeat(2)
    k, v, q = (x[:, :, 200:].repeat(2, 1, 1, 1) for x in given(size))
    cache.attend(0, k=k, v=v, q=q)
    wanted = given(size)[1]
    assert (cache.dequantize(0, "v")[1:] - wanted).norm() < 0.2 * wanted.norm()
    other.reset()
    k, v, q = given()
    other.attend(0, k=k, v=v, q=q)
    assert not isinstance(other.entry(0).v.codec, ScaledCodec)


def test_a_budget_keeps_them_on_every_rung():
    size = 2.0**-20
    rungs = ["int:bits=8", "int:bits=4"]
    cache = filled("none", size, pieces=60, budget=85_000, rungs=["none", *rungs])
    assert str(cache.specs[0]) == "int:bits=4"
    plain = filled("none", 1.0, pieces=60, budget=85_000, rungs=["none", *rungs])
    assert error(cache, size, "v") == pytest.approx(error(plain, 1.0, "v"), rel=0.1)


def test_pages_and_stored_prefixes_refuse_them():
    for spec, size in (("int:bits=8", 1.0), ("int:bits=8", 0.0), ("none", 2.0**-20)):
        filled(spec, size, layout="paged", num_pages=32)
    for side in "kv":
        with pytest.raises(NonFiniteError, match=f"{side} has no number above .* too small"):
            filled("int:bits=8", 2.0**-20, side, layout="paged", num_pages=32)
    small, spec = filled("int:bits=8", 2.0**-20), {"version": 1}
    with pytest.raises(MismatchError, match="stored prefixes"):
        packed_part(small.entry(0), spec, 0, 64)
    assert packed_part(filled("int:bits=8").entry(0), spec, 0, 64).streams


def test_larger_ones_may_follow_and_too_large_ones_are_refused():
    cache = filled("int:bits=8", 2.0**-20)
    k, v, q = given()
    cache.attend(0, k=k, v=v, q=q)
    found = cache.dequantize(0, "v")[:, :, TOKENS:]
    assert (found - v).norm() < 0.01 * v.norm()
    with pytest.raises(NonFiniteError):
        cache.attend(0, k=k, v=v * 1e9, q=q)


def test_a_backend_that_is_asked_for_says_that_it_has_no_kernel():
    with pytest.raises(BackendUnavailable, match="ScaledCodec"):
        filled("int:bits=8", 2.0**-20, backend="cpu")


def test_a_state_is_checked():
    codec = filled("int:bits=8").entry(0).v.codec
    assert scaled_as(codec, torch.tensor([9], dtype=torch.int16)).state()[NAME].tolist() == [9]
    for bad in (torch.tensor([9]), torch.tensor([0, 9], dtype=torch.int16), *(
        torch.tensor([x], dtype=torch.int16) for x in (0, -3, 121)
    )):  # fmt: skip
        with pytest.raises(FormatError, match="power of two"):
            scaled_as(codec, bad)
    assert scaled_for(codec, 0.0) is codec and scaled_for(codec, 1e-45).power == 120
