"""Tokens that a codec of `trellis` accepts can be encoded, whatever it has learnt."""

import pytest
import torch

from kvpact import parse_spec
from kvpact.errors import FormatError, NonFiniteError
from kvpact.kernels.cpu.encode import CodecEncoder
from kvpact.methods.context import Context
from kvpact.methods.trellis_codec import LARGEST_TOKEN
from kvpact.quantizers.numbers import LARGEST_E5M3, from_e5m3

DIM = 64


def learnt(spec, tokens, energy=None):
    codec = parse_spec(spec).key.key_codec(DIM, torch.float32)
    return codec.learn(tokens, Context(None, 0, energy))


@pytest.mark.parametrize("spec", ("trellis", "trellis:weights=false", "trellis:blocks=false"))
@pytest.mark.parametrize("channel", (0, 20))
def test_no_scale_overflows_however_uneven_the_channels_are(spec, channel):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.full((DIM,), 1e-4)
    sizes[channel] = LARGEST_TOKEN / 4
    tokens = torch.randn(1, 2, 64, DIM, generator=generator) * sizes
    energy = torch.full((2, DIM), 1e-6)
    energy[..., channel + 1] = 1e6
    codec = learnt(spec, tokens.clamp(-LARGEST_TOKEN, LARGEST_TOKEN), energy)
    signs = torch.randint(0, 2, (1, 2, 64, DIM), generator=generator) * 2.0 - 1.0
    one = torch.zeros(1, 2, 64, DIM)
    one[..., channel + 1] = 1.0
    for x in (signs, one, torch.ones_like(one)):
        scale = from_e5m3(codec.encode(x * codec.max_abs)["scale"])
        assert scale.isfinite().all() and scale.max() <= LARGEST_E5M3


def test_the_native_limit_is_the_codecs():
    codec = parse_spec("trellis").key.key_codec(DIM, torch.float32)
    assert CodecEncoder.of(codec).limit == codec.max_abs == LARGEST_TOKEN


def test_weights_that_fp16_holds_as_zero_are_refused():
    """Keys are divided by them when they are read."""
    tokens = torch.linspace(0, 5e4, DIM).expand(1, 2, 64, DIM).clone()
    tokens[:, :, 1::2] *= -1
    with pytest.raises(NonFiniteError, match="weight of a channel: zero in fp16"):
        learnt("trellis", tokens, torch.linspace(0, 3e-37, DIM).expand(2, DIM))


@pytest.mark.parametrize(
    ("name", "change"), (("weight", lambda x: x * 1.1), ("deviation", lambda x: x * 0.9))
)
def test_a_state_that_would_let_scales_overflow_is_refused(name, change):
    tokens = torch.randn(1, 2, 64, DIM, generator=torch.Generator().manual_seed(2))
    codec = learnt("trellis", tokens)
    with pytest.raises(FormatError, match=name):
        codec.restore({**codec.state(), name: change(codec.state()[name])})


def test_a_token_of_zeros_is_stored_as_zeros():
    codec = parse_spec("trellis:bits=4").value.value_codec(DIM, torch.float32)
    arrays = codec.encode(torch.zeros(1, 2, 32, DIM))
    assert not any(stored.any() for stored in arrays.values())
