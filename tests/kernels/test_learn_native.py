"""What keys of `trellis` learn natively is what the torch body learns, to the bit."""

from __future__ import annotations

import pytest
import torch
from encode_compare import DTYPES, codec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from learn_compare import KINDS, Case, cases, compare
from matrix import LEARNT
from simd_levels import at_level, levels

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import KernelError, NonFiniteError
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load
from kvpact.kernels.torch.backend import TORCH
from kvpact.methods.context import Context
from kvpact.testing import random_offset

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.mark.parametrize("level", levels())
def test_every_level(level):
    with at_level(level):
        for case in cases():
            assert compare(case) == "", case


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Case,
        st.sampled_from(LEARNT),
        st.integers(1, 20).map(lambda n: 16 * n),
        st.integers(1, 5),
        st.sampled_from(KINDS),
        st.sampled_from(DTYPES),
        st.none() | st.lists(st.integers(0, 140), min_size=1, max_size=20).map(tuple),
        st.integers(0, 130),
        st.booleans(),
        st.sampled_from(("plain", "transposed", "sliced", "gaps")),
    )
)
def test_any_tokens(case):
    assert compare(case) == ""


def test_heads_side_by_side():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert compare(Case("trellis", 128, 13, "bases", torch.float16, (0, 5, 70))) == ""
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("size", "energy", "what"),
    [
        (1e5, 1.0, "first key: magnitude"),
        (1e-22, 1.0, "weight of a channel: magnitude nan"),
        (5e4, 3e-37, "weight of a channel: zero in fp16"),
    ],
)
def test_what_is_no_number_in_fp16_is_refused_as_by_torch(size, energy, what):
    codec = codec_of("trellis", "k", 64, torch.float32)
    x = torch.linspace(0, size, 64).expand(1, 2, 64, 64) * (1 - 2 * (torch.arange(64) % 2))[:, None]
    context = Context(None, 0, torch.linspace(0, energy, 64).expand(2, 64))
    told = []
    for backend in (CPU, TORCH):
        with pytest.raises(NonFiniteError, match=what) as caught:
            backend.learn(codec, x, context)
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("offset", (False, True))
@pytest.mark.parametrize(
    "spec", ("trellis", "trellis:bits=3,center=128,sinks=9", "trellis:bits=2,center=0/int:bits=8")
)
def test_caches_learn_the_same(spec, offset):
    """From rows with padding, in pieces, with the queries of the first ones."""
    held = []
    for kernel in ("torch", "auto"):
        generator = torch.Generator().manual_seed(11)
        offsets = {0: random_offset(3, 64, seed=3)} if offset else None
        geometry = CacheGeometry(1, 3, 64, None, torch.bfloat16)
        cache = create_cache(spec, geometry, backend=kernel, key_offsets=offsets)
        config = AttendConfig(padding=torch.tensor([0, 11]))
        for count in (30, 1, 20, 90, 1, 60):
            tokens = torch.randn(2, 12, count, 64, generator=generator).to(torch.bfloat16)
            cache.attend(0, tokens[:, :3], tokens[:, 3:6], tokens[:, 6:], config=config)
        state = cache._layers[0].streams()[0].codec.state()
        held.append([*state.values(), *(cache.dequantize(0, side) for side in "kv")])
        assert cache.stats()["compute"]["learn"] == {"torch" if kernel == "torch" else "cpu": 1}
    assert len(held[0]) == 6
    for a, b in zip(*held, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_codecs_that_are_not_native_are_torchs():
    cache = create_cache(
        "turboquant:bits=3,first=true/trellis", CacheGeometry(1, 2, 64, None, torch.float32)
    )
    k, v = torch.randn(2, 1, 2, 128, 64, generator=torch.Generator().manual_seed(12))
    cache.prefill(0, k, v)
    assert cache.stats()["compute"]["learn"] == {"torch": 1}
    codec = codec_of("turboquant:bits=3,first=true", "k", 64, torch.float32)
    assert CPU.covers("learn", codec, torch.float32) == "no native learning for TurboQuantKeyCodec"
    codec = codec_of("trellis", "k", 64, torch.float32)
    assert CPU.covers("learn", codec, torch.float32) == ""
    assert CPU.covers("learn", codec, torch.float64) == "dtype torch.float64"
    narrow = codec_of("trellis:bits=4", "k", 20, torch.float32)
    assert "fill no words" in CPU.covers("learn", narrow, torch.float32)


def test_other_numbers_of_tokens_are_refused():
    codec = codec_of("trellis", "k", 64, torch.float32)
    with pytest.raises(KernelError, match="refused"):
        CPU.learn(codec, torch.ones(1, 2, 63, 64), Context())
