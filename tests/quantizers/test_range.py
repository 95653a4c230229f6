"""Numbers that can't be stored are found, wherever they stand."""

import math

import pytest
import torch

from kvpact.errors import NonFiniteError
from kvpact.methods.none import ExactCodec
from kvpact.quantizers.numbers import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3, 37), (1, 2, 130, 16)])
def test_one_number_that_is_not_finite_is_found_anywhere(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    x.view(-1)[0] = torch.finfo(dtype).max
    assert all_finite(x) and all_finite(x[:0]) and all_finite(-x)
    places = range(x.numel()) if x.numel() < 300 else range(0, x.numel(), 97)
    for place in places:
        for number in (math.nan, math.inf, -math.inf):
            bad = x.clone()
            bad.view(-1)[place] = number
            assert not all_finite(bad)
            assert not all_finite(torch.stack([bad, bad], -1)[..., 1])  # strides


def test_a_codec_with_two_limits_keeps_both():
    codec = ExactCodec(4, torch.float32)
    codec.check_range(torch.full((1, 1, 3, 4), 3e38))
    codec.max_abs, codec.max_norm = 3.0, 4.0
    for good in ([3.0, 0, 0, 0], [2.0, -2.0, 2.0, 2.0], [-3.0, 2.0, 0, 0], [0.0] * 4):
        codec.check_range(torch.tensor(good).view(1, 1, 1, 4))
    for bad in ([3.1, 0, 0, 0], [0, -3.1, 0, 0], [3.0, 3.0, 0, 0], [2.1, 2.1, 2.1, 2.1]):
        with pytest.raises(NonFiniteError):
            codec.check_range(torch.tensor(bad).view(1, 1, 1, 4))
    codec.max_abs = math.inf
    with pytest.raises(NonFiniteError, match="norm"):
        codec.check_range(torch.tensor([4.1, 0, 0, 0]).view(1, 1, 1, 4))
    codec.check_range(torch.zeros(1, 1, 0, 4))
