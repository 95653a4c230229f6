"""A layer that lets go of tokens behind a window goes on as one that keeps them."""

from dataclasses import replace

import pytest
import torch
from tests.helpers.one_layer import kvq

import kvpact
from kvpact import AttendConfig, CacheGeometry
from kvpact.cache.layer.let_go import keep_last
from kvpact.testing import random_offset

GEOMETRY = CacheGeometry(1, 2, 64, dtype=torch.float32)
OFFSET = {0: random_offset(2, 64, norm=300, seed=2)}
SPECS = ["none", "int:bits=8", "kivi:bits=4,group=64", "trellis:bits=4", "int:bits=4/kivi:bits=2"]
WINDOW = 130
CONFIG = AttendConfig(sliding_window=WINDOW)


def made(spec, window, **more):
    parsed = kvpact.parse_spec(spec).with_options(sinks=0, window=window)
    return kvpact.create_cache(parsed, GEOMETRY, **more)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("first", [700, 100])
def test_what_is_attended_to_stays_the_same(spec, backend, first):
    """After prompts of many and of few segments, in calls of several tokens and single ones."""
    k, v, q = kvq(1000, batch=3, seed=4)
    padding = torch.tensor([0, 5, 99])
    one, other = (made(spec, 40, key_offsets=OFFSET, backend=backend) for _ in range(2))
    sizes = [first, 1, 1, 7, 100, 1, 60, *[1] * 40, 9]
    end, begins = 0, set()
    for index, size in enumerate(sizes):
        part = slice(end, end + size)
        end += size
        config = replace(CONFIG, padding=None if index else padding)
        given = {"k": k[:, :, part], "v": v[:, :, part], "q": q[:, :, part], "config": config}
        got, wanted = (cache.attend(0, **given) for cache in (one, other))
        # Which native kernel runs may depend on the tokens held: each may be off by 5e-4.
        assert (got - wanted).norm() <= (2e-5 if backend == "torch" else 1e-3) * wanted.norm()
        keep_last(one.entry(0), WINDOW - 1)
        held = one.entry(0)._held
        begins.add(held.begin)
        assert held.begin + held.length == end
        assert held.length < WINDOW - 1 + 64 or not one.entry(0).k.packed
    assert len(begins) > 1
    shown = other.dequantize(0, "k")[:, :, held.begin :]
    torch.testing.assert_close(one.dequantize(0, "k"), shown, rtol=1e-5, atol=1e-4)
