"""Numbers that can't be stored are found, wherever they stand."""

import math

import pytest
import torch

from kvpact.errors import NonFiniteError
from kvpact.methods.none import ExactCodec


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
