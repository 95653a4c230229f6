"""Decoding by the native kernel gives the torch body's numbers, bit by bit, at every SIMD level."""

import itertools

import decode_compare
import pytest
import torch
from encode_compare import DTYPES, SPECIAL, WIDTHS, codec_of
from hypothesis import strategies as st
from random_cases import random_cases
from simd_levels import at_level, each_half, levels

from kvpact.kernels.cpu import backend
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@each_half
@pytest.mark.parametrize("level", levels())
def test_every_format_at_every_level(level, half):
    with at_level(level):
        assert decode_compare.differences(half) == []


@random_cases(
    60,
    st.sampled_from(decode_compare.FORMATS),
    st.sampled_from("kv"),
    st.integers(1, 70) | st.sampled_from(WIDTHS),
    st.tuples(st.integers(0, 150), st.integers(0, 150)),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_any_part(spec, side, dim, ends, dtype, seed):
    assert decode_compare.compare(spec, side, dim, min(ends), max(ends) + 1, dtype, seed) == ""


@pytest.mark.parametrize("spec", decode_compare.FORMATS)
def test_special_values(spec):
    """Zeros of both signs, subnormal and tiny numbers, and fp16's largest."""
    generator = torch.Generator().manual_seed(1)
    for side, dtype in itertools.product("kv", DTYPES):
        index = torch.randint(len(SPECIAL), (1, 2, 128, 64), generator=generator)
        codec, store = decode_compare.packed(spec, side, torch.tensor(SPECIAL).to(dtype)[index])
        assert decode_compare.compare_slots(codec, store, 0, 128, dtype, True) == ""
        assert decode_compare.compare_slots(codec, store, 0, 128, torch.float32, False) == ""


@pytest.mark.parametrize("spec", ("int:bits=2", "int:bits=4,zero=true", "none:dtype=fp32"))
def test_what_is_beyond_fp16_becomes_its_largest_number(spec):
    tokens = torch.full((1, 1, 32, 64), 65000.0)
    tokens[..., ::2] = -65500.0
    codec, store = decode_compare.packed(spec, "k", tokens if spec[0] == "i" else tokens * 3)
    assert decode_compare.compare_slots(codec, store, 0, 32, torch.float16, True) == ""


def test_what_the_kernel_can_not_take_raises_before_it_is_called(monkeypatch):
    monkeypatch.setattr(backend.ctypes, "byref", lambda args: pytest.fail("C++ was entered"))
    decode_compare.check_refusals(decode_compare.native)


def test_wide_vectors_are_torchs():
    codec = codec_of("fp8", "k", 2048, torch.float32)
    assert CPU.covers("decode", codec, torch.float32) == "width 2048 is above 1024"
