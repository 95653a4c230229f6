"""`KeyOffset`: which pairs it takes, what it refuses, and that it is the bias turned by RoPE."""

import math

import pytest
import torch

from kvpact import KeyOffset
from kvpact.errors import DtypeError, GeometryError, NonFiniteError
from kvpact.kernels import RowOffset
from kvpact.testing import random_offset, random_tokens

FREQUENCIES = 1e6 ** -(torch.arange(64) / 64)


def rotated(x, frequencies, layout, positions, scaling=1.0):
    """RoPE as models do it, in fp64: the first channels of `[..., T, D]` by position."""
    angles = positions.double()[:, None] * frequencies.double()
    cos, sin = scaling * angles.cos(), scaling * angles.sin()
    count = 2 * len(frequencies)
    turning, still = x.double()[..., :count], x.double()[..., count:]
    pairs = turning.unflatten(-1, (2, -1) if layout == "half" else (-1, 2))
    a, b = pairs.unbind(-2 if layout == "half" else -1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -2 if layout == "half" else -1)
    return torch.cat([turned.flatten(-2), still], -1)


def few_pairs(heads, dim, norm, seed=0):
    """A bias of that norm in 8 random pairs of each head."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(heads, dim)
    for row in bias:
        for pair in torch.randperm(dim // 2, generator=generator)[:8].tolist():
            row[[pair, pair + dim // 2]] = torch.randn(2, generator=generator)
    return norm * bias / bias.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [128, 32])
def test_it_is_the_bias_turned_by_rope(layout, rotary):
    bias = random_tokens(3, 128, seed=1)
    frequencies = FREQUENCIES[:: 128 // rotary]
    offset = KeyOffset.from_bias(bias, frequencies, layout, scaling=1.25, leave=0)
    assert len(offset.frequencies) == 64
    known = RowOffset(offset, (0, 7)).put_back(torch.zeros(2, 3, 50, 128), 1000)
    for row, start in zip(known, (1000, 993), strict=True):
        positions = torch.arange(start, start + 50)
        expected = rotated(bias[:, None].expand(-1, 50, -1), frequencies, layout, positions, 1.25)
        torch.testing.assert_close(row.double(), expected, atol=2e-4, rtol=0)


def test_logits_are_those_of_what_was_taken_off():
    offset = random_offset(2, 64, seed=3)
    known = RowOffset(offset, (0, 5))
    q = random_tokens(2, 2, 6, 64, seed=4)
    keys = known.put_back(torch.zeros(2, 2, 40, 64), 100)
    torch.testing.assert_close(known.logits(q, 100, 140), q @ keys.mT, atol=1e-4, rtol=1e-5)
    x = random_tokens(2, 2, 40, 64, seed=5)
    assert torch.equal(known.without(x, 100), x - keys)


def test_tokens_have_the_same_offset_alone_and_together():
    known = RowOffset(random_offset(2, 64, norm=600, seed=3))
    x = random_tokens(1, 2, 70, 64, seed=1)
    whole = known.without(x, 5000)
    for t in range(70):
        assert torch.equal(known.without(x[:, :, t : t + 1], 5000 + t), whole[:, :, t : t + 1])


def test_cosine_and_sine_are_rounded_as_models_round_them():
    offset = KeyOffset((0.7,), ((0, 1),), (((1.0, 0.0),),), dtype=torch.bfloat16)
    known = RowOffset(offset).put_back(torch.zeros(1, 1, 9, 2), 0)[0, 0]
    angles = torch.arange(9) * torch.tensor(0.7)
    expected = torch.stack([angles.cos().bfloat16(), angles.sin().bfloat16()], 1).float()
    assert torch.equal(known, expected)


def test_pairs_that_hold_next_to_nothing_stay_in_the_keys():
    bias = few_pairs(2, 128, 605)
    large = (bias.unflatten(1, (2, 64)) != 0).any(1).any(0).sum()
    noisy = bias + 0.01 * random_tokens(2, 128, seed=1)
    offset = KeyOffset.from_bias(noisy, FREQUENCIES)
    assert len(offset.frequencies) == large
    left = noisy[:, None] - RowOffset(offset).put_back(torch.zeros(1, 2, 1, 128), 0)[0]
    assert (left[:, 0].norm(dim=1) <= 0.001 * noisy.norm(dim=1)).all()
    assert KeyOffset.from_bias(torch.zeros(2, 128), FREQUENCIES) is None
    assert KeyOffset.from_bias(bias, FREQUENCIES, leave=1.0) is None
    only = KeyOffset.from_bias(bias, FREQUENCIES, leave=torch.tensor([0.001, 1.0]))
    assert len(only.frequencies) == 8


def test_equal_numbers_have_equal_digests():
    one, other = (random_offset(2, 64, seed=3) for _ in range(2))
    assert one.digest == other.digest and one.digest != random_offset(2, 64, seed=4).digest
    parts = one.frequencies, one.channels, one.bias
    assert KeyOffset(*parts, scaling=2.0).digest != one.digest
    assert KeyOffset(*parts, dtype=torch.float16).digest != one.digest
    assert math.isclose(one.norm, 10, rel_tol=1e-5)
    assert repr(one) == "KeyOffset(heads=2, pairs=8, norm=10.0)"


GOOD = {"frequencies": [1.0, 0.5], "channels": [[0, 2], [1, 3]], "bias": [[[1.0, 2.0]] * 2]}


@pytest.mark.parametrize(("change", "error"), [
    ({"frequencies": []}, GeometryError), ({"frequencies": [1.0]}, GeometryError),
    ({"frequencies": [1.0, math.nan]}, NonFiniteError), ({"frequencies": "fast"}, DtypeError),
    ({"channels": [[0, 2], [1, 2]]}, GeometryError),
    ({"channels": [[0, 2], [1, -3]]}, GeometryError),
    ({"channels": [[0.0, 2.0], [1.0, 3.0]]}, DtypeError), ({"channels": [0, 2]}, GeometryError),
    ({"bias": [[1.0, 2.0]]}, GeometryError), ({"bias": [[[1.0, math.inf]] * 2]}, NonFiniteError),
    ({"bias": [[[1.0, 2.0]]]}, GeometryError), ({"scaling": math.inf}, NonFiniteError),
    ({"scaling": [1.0]}, GeometryError), ({"dtype": torch.float64}, DtypeError),
], ids=str)  # fmt: skip
def test_wrong_numbers_are_refused_by_name(change, error):
    KeyOffset(**GOOD)
    with pytest.raises(error):
        KeyOffset(**GOOD | change)


def test_a_bias_that_does_not_fit_is_refused_by_name():
    bias = torch.ones(2, 64)
    with pytest.raises(GeometryError, match="128 channels of 64"):
        KeyOffset.from_bias(bias, FREQUENCIES)
    with pytest.raises(GeometryError, match="half, interleaved"):
        KeyOffset.from_bias(bias, FREQUENCIES[:32], "both")
    with pytest.raises(GeometryError, match="scaling"):
        KeyOffset.from_bias(bias, FREQUENCIES[:32], scaling=0.0)
    with pytest.raises(NonFiniteError):
        KeyOffset.from_bias(bias * math.nan, FREQUENCIES[:32])
