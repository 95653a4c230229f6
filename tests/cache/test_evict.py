"""Caches that let go of tokens: what is left, what is free, and what is refused."""

import pytest
import torch
from tests.helpers.faults import disturbed, is_free, length_of

import kvpact
from kvpact.errors import GeometryError, SpecError
from kvpact.testing import random_offset, random_tokens

HEADS, DIM = 2, 64


def filled(spec, tokens, batch=2, **options):
    cache = kvpact.create_cache(
        spec, kvpact.CacheGeometry(2, HEADS, DIM, DIM, torch.float32), **options
    )
    for layer in range(2):
        k, v = (random_tokens(batch, HEADS, tokens, DIM, seed=2 * layer + i) for i in (0, 1))
        cache.prefill(layer, k, v)
    return cache


@pytest.mark.parametrize("spec", ["none", "int:bits=8", "turboquant:bits=4", "trellis:bits=4"])
def test_half_of_the_tokens_are_nearly_half_of_the_bytes(spec):
    cache = filled(spec, 6144, batch=1)
    before, values = cache.memory_usage(), cache.dequantize(1, "v")
    twin = cache.fork()
    cache.evict(300, 300 + 3072)
    assert cache.seq_len(0) == cache.seq_len(1) == 3072
    assert cache.memory_usage() <= 0.55 * before
    left = cache.dequantize(1, "v")
    wanted = torch.cat([values[:, :, :300], values[:, :, 3372:]], 2)
    assert torch.equal(left[:, :, :300], wanted[:, :, :300])  # as they lay
    assert torch.equal(left[:, :, -64:], wanted[:, :, -64:])  # exact ones
    bound = {"none": 0, "int:bits=8": 0.004, "turboquant:bits=4": 0.02, "trellis:bits=4": 0.07}
    assert (left - wanted).norm() <= bound[spec] * wanted.norm()
    assert torch.equal(twin.dequantize(1, "v"), values)


@pytest.mark.parametrize(("keep", "match"), [
    (torch.tensor([0, 1, 1]), "ascending"),
    (torch.tensor([0, 100]), "within 100"),
    (torch.tensor([-1, 5]), "within 100"),
    (torch.tensor([0.0, 1.0]), "integers"),
    (torch.zeros(1, 2, HEADS, 1, dtype=torch.int64), r"\[2, 2, 2, n\]"),
    ([0, 1], "integers"),
])  # fmt: skip
def test_what_can_not_be_kept_is_refused(keep, match):
    cache = filled("int:bits=8", 100)
    before = cache.dequantize(0, "k")
    with pytest.raises(GeometryError, match=match):
        cache.compact(keep)
    for begin, end in ((5, 101), (7, 6), (-1, 3)):
        with pytest.raises(GeometryError):
            cache.evict(begin, end)
    assert torch.equal(cache.dequantize(0, "k"), before)


def test_padded_rows_and_positions_are_refused():
    cache = kvpact.create_cache("none", kvpact.CacheGeometry(1, HEADS, DIM, DIM, torch.float32))
    k = random_tokens(2, HEADS, 20, DIM, seed=0)
    cache.prefill(0, k, k, config=kvpact.AttendConfig(padding=torch.tensor([0, 3])))
    with pytest.raises(GeometryError, match="padded"):
        cache.evict(5, 9)
    cache.select(torch.tensor([0]))  # the row without padding
    cache.evict(5, 9)
    assert torch.equal(cache.dequantize(0, "k"), torch.cat([k[:1, :, :5], k[:1, :, 9:]], 2))
    offsets = {0: random_offset(HEADS, DIM, seed=1)}
    cache = filled("turboquant:bits=4", 100, key_offsets=offsets)
    with pytest.raises(SpecError, match="positions"):
        cache.evict(5, 9)
    assert cache.seq_len() == 100


def test_layers_of_unlike_lengths_are_refused():
    cache = filled("none", 100)
    k = random_tokens(2, HEADS, 1, DIM, seed=9)
    cache.prefill(0, k, k)
    with pytest.raises(GeometryError, match="100 and 101"):
        cache.evict(5, 9)


def test_an_interrupt_leaves_all_layers_as_before_or_all_as_after():
    seen, twin = set(), filled("none", 12)
    lines = length_of(lambda: twin.evict(5, 9), "interrupt")
    for n in (1, *range(lines - 30, lines + 1)):
        cache = filled("none", 12)
        disturbed(lambda cache=cache: cache.evict(5, 9), "interrupt", n)
        assert all(is_free(cache.entry(layer).lock) for layer in (0, 1))
        seen.add((cache.seq_len(0), cache.seq_len(1)))
    assert seen == {(12, 12), (8, 8)}
