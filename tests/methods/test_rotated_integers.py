"""Integers after a rotation: the same integers, of the rotated tokens."""

import math

import pytest
import torch
from one_layer import normal

import kvpact
from kvpact.errors import NonFiniteError, SpecError
from kvpact.methods import Codec
from kvpact.methods.integer import Integer
from kvpact.transforms import RandomHadamard


def codec(dim: int, **options) -> Codec:
    return Integer(rotate=True, **options).key_codec(dim, torch.float32)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(
    "options", [{"bits": 4, "group": 128}, {"bits": 8}, {"bits": 3, "zero": True}]
)
def test_the_slots_are_those_of_rotated_tokens(dim, options):
    x = normal(1, 2, 40, dim, seed=1) + 1
    rotated = codec(dim, seed=7, **options)
    plain = Integer(**options).key_codec(dim, torch.float32)
    found, expected = rotated.encode(x), plain.encode(RandomHadamard(dim, 7).forward(x))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(rotated.decode(found), plain.decode(expected))
    other = codec(dim, seed=8, **options).encode(x)
    assert not torch.equal(other["codes"], found["codes"])


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 8}, {"bits": 2, "zero": True}])
def test_no_token_up_to_the_encoding_limit_is_beyond_the_range(options):
    """The worst one has all of its length in one rotated channel."""
    made = codec(64, **options)
    worst = torch.zeros(1, 1, 2, 64)
    worst[..., 0, 3], worst[..., 1, 3] = math.sqrt(64), -math.sqrt(64)
    x = made.transform.inverse(worst)
    assert x.abs().max() == pytest.approx(1, rel=1e-5)
    x *= made.form.limit
    decoded = made.transform.inverse(made.decode(made.encode(x)))
    assert (decoded - x).norm() < 0.2 * x.norm()
    with pytest.raises(NonFiniteError):
        made.encode(1.1 * x)


def test_a_seed_without_a_rotation_is_refused():
    with pytest.raises(SpecError, match="seed=3 should be left out, or with rotate=true"):
        kvpact.parse_spec("int:bits=4,seed=3")
    assert str(kvpact.parse_spec("int:bits=4,rotate=1,seed=3")) == "int:bits=4,rotate=true,seed=3"
