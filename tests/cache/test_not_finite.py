"""What overflows fp16 side information is refused, and changes nothing."""

import pytest
import torch
from one_layer import kvq, normal, shown
from torch import Tensor

import kvpact
from kvpact import CacheGeometry
from kvpact.errors import NonFiniteError
from kvpact.testing.data import by_name


def state(cache) -> list[Tensor]:
    return [tensor.clone() for layer in cache._layers for tensor in layer.tensors()]


# Values that are finite, but whose side information is beyond fp16; and values just below.
OVERFLOWS = {
    "turboquant:bits=4": (1e5, 5e4), "turboquant:bits=4,scale=l2": (1e5, 6e4),
    "turboquant:bits=3,center=64": (1e6, 1.7e3), "turboquant:bits=3,mode=prod": (1e6, 1e4),
    "int:bits=4": (1e6, 6e4), "int:bits=8": (1e7, 6e4), "kivi:bits=2": (1e5, 6e4),
    "kvarn:bits=3": (1e6, 4e3), "fp8": (1e8, 6e4), "fp8:scale=none": (500.0, 400.0),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "too_large", "fits"), [(x, *y) for x, y in OVERFLOWS.items()])
@pytest.mark.parametrize("held", [0, 140])
def test_overflow_of_side_information_is_refused_and_changes_nothing(spec, too_large, fits, held):
    k, v, q = kvq(140, dim=128)
    # Signs alone: the norm of a vector is 11.3 times the magnitude, beyond fp16 in every case.
    x = torch.sign(normal(1, 2, 64, 128, seed=4))
    cache = kvpact.create_cache(spec, CacheGeometry(1, 2, 128))
    if held:
        cache.prefill(0, k, v)
    before = state(cache)
    for given in ((x * too_large, x), (x, x * too_large)):
        for call in (cache.attend, cache.prefill):
            with pytest.raises(NonFiniteError, match=r"beyond|holds magnitudes up to"):
                call(0, **by_name(*given, q[:, :, :64]))
        assert cache.seq_len(0) == held
        assert all(map(torch.equal, state(cache), before))
    cache.prefill(0, x * fits, x * fits)
    for stored in shown(cache, x, x):
        assert torch.isfinite(stored).all()
        last = stored[:, :, held:]
        assert (last - x * fits).square().mean().sqrt() < 0.6 * fits
