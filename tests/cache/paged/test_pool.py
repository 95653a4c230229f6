"""The pool of pages: atomic appends, counted references, packed slots (defects B4 and B5)."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.cache import bytes_per_token
from kvpact.errors import CacheFull, SequenceError
from kvpact.spec import parse_spec
from kvpact.testing import method_specs, random_tokens, same_bytes

GEOMETRY = CacheGeometry(2, 2, 64, dtype=torch.float32)
# Pages of 32 tokens, as the numbers below have it.
METHODS = [
    "kvarn:bits=3,group=32" if spec == "kvarn:bits=3" else spec
    for spec in method_specs(fitted=False)
    if spec != "none"
]
# What pages do depends on groups alone: none, of a tile, and of K alone.
GROUPS = ("int:bits=4", "kvarn:bits=3,group=32", "kivi:bits=2")


def kv(tokens, seed=0):
    return random_tokens(2, tokens, 64, seed=seed), random_tokens(2, tokens, 64, seed=seed + 99)


def fill(cache, seq, tokens, seed=0):
    for layer in range(2):
        cache.append(layer, {seq: kv(tokens, seed)})


# --- Part of the tokens stayed when the pool ran out.


@pytest.mark.parametrize("spec", GROUPS)
def test_append_is_atomic(spec):
    cache = PagedKVCache(spec, GEOMETRY, 4)
    first, second = cache.allocate(), cache.allocate()
    fill(cache, first, 40)
    fill(cache, second, 20)
    before = [tensor.clone() for tensor in cache.pool.tensors()]
    for layer in range(2):
        with pytest.raises(CacheFull, match=r"2 pages .* wanted, 1 of 4 free"):
            cache.append(layer, {first: kv(40, 3), second: kv(30, 4)})
    assert [cache.seq_len(s, layer) for s in (first, second) for layer in (0, 1)] == [
        40,
        40,
        20,
        20,
    ]
    assert cache.num_free_pages == 1
    assert all(same_bytes(a, b) for a, b in zip(before, cache.pool.tensors(), strict=True))
    fill(cache, second, 30, 4)  # what fits is stored
    assert cache.seq_len(second, 1) == 50


def test_a_step_takes_the_pages_of_all_layers_at_once():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 3)
    first, second = cache.allocate(), cache.allocate()
    cache.append(0, {first: kv(64)})
    with pytest.raises(CacheFull):
        cache.append(0, {second: kv(64)})
    cache.append(1, {first: kv(64)})  # can't fail: the first layer took its pages
    assert cache.seq_len(first, 1) == 64


# --- Double free was accepted.


def test_double_free_is_an_error():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 4)
    kept, gone = cache.allocate(), cache.allocate()
    fill(cache, kept, 40)
    fill(cache, gone, 40)
    cache.free(gone)
    with pytest.raises(SequenceError, match="was freed"):
        cache.free(gone)
    with pytest.raises(SequenceError, match="never allocated"):
        cache.free(17)
    assert cache.num_free_pages == 2
    other = cache.allocate()  # the freed pages are given out once each
    fill(cache, other, 64)
    assert len(set(cache.block_table([kept, other]).flatten().tolist())) == 4


# --- No reference count, copy on write, truncate or prefix sharing.


@pytest.mark.parametrize("spec", GROUPS)
def test_forks_share_pages_until_one_writes(spec):
    cache = PagedKVCache(spec, GEOMETRY, 8)
    seq = cache.allocate()
    fill(cache, seq, 80)
    fork = cache.fork(seq)
    assert cache.num_free_pages == 5
    shown = cache._sequence(seq).layers[1].dequantize("k")
    fill(cache, fork, 40, seed=5)
    assert cache.num_free_pages == 3  # a copy of the page that is written, and a new one
    assert same_bytes(cache._sequence(seq).layers[1].dequantize("k"), shown)
    cache.free(seq)
    assert cache.num_free_pages == 4  # the first two are the fork's
    twin = create_cache(spec, GEOMETRY)
    for part in (kv(80), kv(40, 5)):
        twin.prefill(1, *(x[None] for x in part))
    assert same_bytes(cache._sequence(fork).layers[1].dequantize("k"), twin.dequantize(1, "k"))
    cache.free(fork)
    assert cache.num_free_pages == 8


def test_truncate_gives_pages_back():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 4)
    seq = cache.allocate()
    fill(cache, seq, 128)
    cache.truncate(seq, 33)
    assert (cache.seq_len(seq), cache.num_free_pages) == (33, 2)
    cache.truncate(seq, 0)
    assert (cache.seq_len(seq), cache.num_free_pages) == (0, 4)
    fill(cache, seq, 128, seed=1)


def test_equal_prefixes_share_pages():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 8)
    seq, ids = cache.allocate(), list(range(100))
    fill(cache, seq, 100)
    cache.publish(seq, ids)
    other = cache.allocate([*ids, 5, 6])
    assert (cache.seq_len(other), cache.num_free_pages) == (96, 4)
    assert torch.equal(cache.block_table(other), cache.block_table(seq)[:3])
    assert cache.seq_len(cache.allocate([7, *ids])) == 0


# --- Pages were never compressed.


@pytest.mark.parametrize("spec", METHODS)
def test_pages_hold_packed_slots(spec):
    geometry = CacheGeometry(2, 2, 64, 128, torch.float32)
    pool = PagedKVCache(spec, geometry, 10).pool
    held = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors())
    slots = bytes_per_token(parse_spec(spec), geometry)
    assert held == 2 * 10 * pool.page_size * (slots["key_bytes"] + slots["value_bytes"])
    floats = 2 * 10 * pool.page_size * 2 * (64 + 128) * 4
    assert held < floats / (3.5 if spec == "fp8" else 6)
    assert not any(tensor.dtype == torch.float32 for tensor in pool.tensors())


@pytest.mark.parametrize("spec", GROUPS)
def test_attention_reads_the_pages(spec, monkeypatch):
    """Nothing of the size of all tokens is decompressed on the way."""
    cache = PagedKVCache(spec, GEOMETRY, 64, backend="torch")
    seq = cache.allocate()
    fill(cache, seq, 1500)
    codec = type(cache._sequence(seq).layers[0].k.codec)
    decode, widest = codec.decode, []

    def counted(self, arrays):
        result = decode(self, arrays)
        widest.append(result.shape[2])
        return result

    monkeypatch.setattr(codec, "decode", counted)
    k, v = (x[None] for x in kv(1, 3))
    cache.view([seq]).decode(0, k, v, random_tokens(1, 4, 1, 64))
    assert widest
    assert max(widest) <= 512
