"""Bytes are found by walking, whatever an object says of itself."""

import numpy
import pytest
import torch

from kvpact import CacheGeometry, create_cache
from kvpact.testing import random_tokens


@pytest.fixture
def held_bytes(module):
    return module("leaderboard_bytes").held_bytes


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("codes",)


def test_every_kind_of_part_is_counted_once(held_bytes):
    codes = torch.zeros(100, dtype=torch.uint8)
    holder = Holder(layers=[{"codes": codes}, (codes, codes[:10])], scale=torch.zeros(3))
    holder.itself = holder
    assert held_bytes(holder) == 100 + 12
    slotted = Slotted()
    slotted.codes = torch.zeros(7, dtype=torch.float64)
    assert held_bytes([slotted, slotted]) == 56


def test_a_view_keeps_its_storage(held_bytes):
    assert held_bytes(Holder(window=torch.zeros(1000)[-10:])) == 4000
    assert held_bytes(numpy.zeros(50)[:5]) == 400


def test_models_and_classes_are_not_the_caches(held_bytes):
    holder = Holder(model=torch.nn.Linear(8, 8), kind=Holder, module=torch, keys=torch.zeros(2))
    assert held_bytes(holder) == 8


def test_a_compressed_cache_holds_what_it_says(held_bytes):
    cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64), backend="torch")
    cache.prefill(0, random_tokens(1, 2, 300, 64), random_tokens(1, 2, 300, 64, seed=1))
    # A rotation's signs and the like belong to the codec and not to the cache: at most a few kB.
    assert 0 <= held_bytes(cache) - cache.memory_usage() < 4096
