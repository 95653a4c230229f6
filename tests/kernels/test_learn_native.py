"""What keys of `trellis` learn natively is what the torch body learns, to the bit."""

import pytest
import torch
from encode_compare import DTYPES, codec_of
from hypothesis import strategies as st
from learn_compare import KINDS, Case, cases, compare
from matrix import LEARNT
from random_cases import random_cases
from simd_levels import at_level, levels

from kvpact.errors import KernelError, NonFiniteError
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load
from kvpact.kernels.torch.backend import TORCH
from kvpact.methods.context import Context

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.mark.parametrize("level", levels())
def test_every_level(level):
    with at_level(level):
        for case in cases():
            assert compare(case) == "", case


@random_cases(
    30,
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
    ),
)
def test_any_tokens(case):
    assert compare(case) == ""


def test_heads_side_by_side(set_threads):
    set_threads(3)
    assert compare(Case("trellis", 128, 13, "bases", torch.float16, (0, 5, 70))) == ""


@pytest.mark.parametrize(("size", "energy", "what"), [
    (1e5, 1.0, "first key: magnitude"),
    (1e-22, 1.0, "weight of a channel: magnitude nan"),
    (5e4, 3e-37, "weight of a channel: zero in fp16"),
])  # fmt: skip
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


def test_codecs_that_are_not_native_are_torchs():
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
