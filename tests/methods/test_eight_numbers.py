"""The examples of methods: eight numbers in, their codes out."""

import doctest
from importlib import import_module

import pytest
import torch

from kvpact import parse_spec
from kvpact.methods.base import make_codec

MODULES = ("fp8", "integer", "kivi", "polarquant", "qjl", "trellis", "turboquant")


@pytest.mark.parametrize("name", MODULES)
def test_codes(name):
    names = {"make_codec": make_codec, "torch": torch}
    done = doctest.testmod(import_module(f"kvpact.methods.{name}"), extraglobs=names)
    assert done.attempted >= 3 and not done.failed


def test_codes_by_hand():
    """4 bits, group of four: the scale is the largest magnitude, with its sign, over -8."""
    tokens = torch.tensor([[[[4.0, -2, 1, 0, 0.8, 0.3, -0.1, -0.4]]]])
    found = make_codec(parse_spec("int:bits=4,group=4").value, False, 8, torch.float32)
    fields = found.encode(tokens)
    assert fields["scale"].flatten().tolist() == pytest.approx([-0.5, -0.1], rel=1e-3)
    assert fields["codes"].flatten().tolist() == [0, 12, 6, 8, 0, 5, 9, 12]
