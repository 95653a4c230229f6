"""What all codecs keep to: zeros, any order in memory, and no equality by value."""

from dataclasses import dataclass

import pytest
import torch
from one_layer import normal

from kvpact import parse_spec
from kvpact.errors import RegistrationError
from kvpact.formats import TokenField
from kvpact.methods import Codec
from kvpact.testing import method_specs, variant_specs

FP32 = torch.float32


@pytest.mark.parametrize("spec", [*method_specs(fitted=False), *variant_specs(fitted=False)])
def test_zeros_stay_zeros_and_bytes_do_not_depend_on_the_memory(spec):
    for dim in (64, 80):
        method = parse_spec(spec)
        for codec in (method.key.key_codec(dim, FP32), method.value.value_codec(dim, FP32)):
            assert not codec.decode(codec.encode(torch.zeros(1, 1, codec.group * 8, dim))).any()
            x = normal(2, 3, 37 if codec.group == 1 else 2 * codec.group, dim)
            whole = codec.encode(x)
            scattered = codec.encode(x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0))
            assert all(torch.equal(scattered[name], array) for name, array in whole.items())


class Raw(Codec):
    """Stores tokens as they are."""

    def encode(self, x, frozen=None):
        return {"x": x}

    def decode(self, arrays):
        return arrays["x"]


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"unsafe_hash": True}], ids=str)
def test_a_codec_that_compares_by_value_is_refused(options):
    """It would share another's prepared format."""

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
    assert one != other and len({one, other}) == 2 and one.dim == other.dim == 4
