"""A codec is a key of its own: one that compares by value would share another's prepared format."""

from dataclasses import dataclass

import pytest
import torch

from kvpact.errors import RegistrationError
from kvpact.formats import TokenField
from kvpact.methods import Codec


class Raw(Codec):
    """Stores tokens as they are."""

    def encode(self, x, frozen=None):
        return {"x": x}

    def decode(self, arrays):
        return arrays["x"]


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"unsafe_hash": True}], ids=str)
def test_a_codec_that_compares_by_value_is_refused(options):
    @dataclass(**options)
    class Valued(Raw):
        dim: int = 4

    with pytest.raises(RegistrationError, match="eq=False"):
        Valued()


def test_a_codec_may_be_a_dataclass_without_equality():
    @dataclass(eq=False)
    class Plain(Raw):
        dim: int = 4

        def __post_init__(self):
            self.fields = (TokenField("x", self.dim, torch.float32),)

    one, other = Plain(), Plain(4)
    assert one != other and len({one, other}) == 2
    assert one.dim == other.dim == 4
