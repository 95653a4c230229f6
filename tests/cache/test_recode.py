"""Snapshots by another spec, and back."""

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, KeyOffset, create_cache, recode
from kvpact.errors import SpecError
from kvpact.snapshot import Identity
from kvpact.testing import random_tokens
from kvpact.testing.method_base import relative_error

GEOMETRY = CacheGeometry(2, 2, 32, 16, torch.float32)


def filled(spec="turboquant:bits=4", tokens=200, padding=None, **options):
    cache = create_cache(spec, GEOMETRY, **options)
    batch = 1 if padding is None else len(padding)
    config = AttendConfig(padding=None if padding is None else torch.tensor(padding))
    for layer in range(2):
        k = random_tokens(batch, 2, tokens, 32, seed=layer)
        cache.store(layer, k=k, v=random_tokens(batch, 2, tokens, 16, seed=9), config=config)
    return cache


@pytest.mark.parametrize("spec", ["int:bits=8", "kivi:bits=4", "pca:bits=6", "none"])
def test_tokens_are_those_that_were_read(spec):
    cache = filled()
    ids = torch.arange(200)
    held = cache.snapshot(token_ids=ids, identity=Identity(model="m", tenant="t"))
    other = recode(held, spec)
    assert torch.equal(other.token_ids, ids[None]) and other.tokens == 200
    other.require(model="m", tenant="t")
    restored = create_cache(spec, GEOMETRY)
    restored.restore(other)
    for side in ("k", "v"):
        wanted, found = cache.dequantize(1, side), restored.dequantize(1, side)
        assert relative_error(wanted, found) < 0.12
        # Sinks and window are exact in both.
        assert torch.equal(found[:, :, :4], wanted[:, :, :4])
        assert torch.equal(found[:, :, -64:], wanted[:, :, -64:])


def test_back_into_the_own_spec():
    cache = filled("int:bits=8,window=8")
    small = recode(cache.snapshot(), "turboquant:bits=2,window=8")
    assert small.nbytes < 0.7 * cache.snapshot().nbytes
    again = recode(small, "int:bits=8,window=8")
    restored = create_cache("int:bits=8,window=8", GEOMETRY)
    restored.restore(again)
    assert relative_error(cache.dequantize(0, "k"), restored.dequantize(0, "k")) < 0.36
    with pytest.raises(SpecError):
        create_cache("int:bits=8", GEOMETRY).restore(small)


def test_padding_and_recipes_are_kept():
    cache = filled(padding=[30, 0])
    recipe = {"default": "int:bits=8", "layers": {1: "none"}}
    restored = create_cache(recipe, GEOMETRY)
    restored.restore(recode(cache.snapshot(), recipe))
    assert restored.entry(0).padding.tolist() == [30, 0]
    assert torch.equal(restored.dequantize(1, "v"), cache.dequantize(1, "v"))
    assert torch.equal(*(x.dequantize(0, "k")[0, :, 30:34] for x in (restored, cache)))


def test_key_offsets_come_along_or_are_given():
    offset = KeyOffset((0.5,), ((0, 16),), (((40.0, 3.0),), ((-20.0, 9.0),)))
    offsets = {0: offset, 1: offset}
    cache = filled("int:bits=8", key_offsets=offsets)
    kept = recode(cache.snapshot(), "int:bits=4")
    create_cache("int:bits=4", GEOMETRY, key_offsets=offsets).restore(kept)
    bare = recode(cache.snapshot(), "int:bits=4", key_offsets={})
    create_cache("int:bits=4", GEOMETRY).restore(bare)
    given = recode(bare, "int:bits=8", key_offsets=offsets)
    create_cache("int:bits=8", GEOMETRY, key_offsets=offsets).restore(given)
    # What is empty stays empty.
    assert recode(create_cache("int:bits=8", GEOMETRY).snapshot(), "none").tokens == 0
