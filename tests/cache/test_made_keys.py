"""Caches without keys: who attends makes them of the values."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.contract import AttendConfig
from kvpact.errors import BackendUnavailable, GeometryError
from kvpact.kernels import attend_exact
from kvpact.snapshot import Snapshot

HEADS, WIDTH = 2, 40
SPECS = ("none", "trellis:bits=4", "turboquant:bits=4", "kivi:bits=2", "int:bits=8", "kvarn")
WEIGHT = torch.rand(WIDTH, generator=torch.Generator().manual_seed(0)) + 0.5


class Keys:
    """Keys that are values times weights, and a step at every place."""

    def make(self, v, start):
        places = torch.arange(start, start + v.shape[2]).view(-1, 1) / 100
        return (v.float() * WEIGHT + places).to(v.dtype)

    def logits(self, rows, v, start):
        return rows @ self.make(v, start).mT


def empty(spec, dtype=torch.float32):
    return create_cache(spec, CacheGeometry(1, HEADS, 0, WIDTH, dtype=dtype))


def tokens(count, heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count + heads)
    return torch.randn(2, heads, count, WIDTH, generator=generator).to(dtype)


def fill(cache, v, sizes):
    for part in v.split(sizes, dim=2):
        step = cache.store(0, k=part[..., :0], v=part)
    return step


DRAW = torch.Generator().manual_seed(1)
CONFIGS = {
    "plain": AttendConfig(),
    "softcap": AttendConfig(softmax_scale=0.3, softcap=4.0),
    "window": AttendConfig(sliding_window=30),
    "sinks": AttendConfig(sink_logits=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "mask": AttendConfig(mask=torch.rand(2, 1, 5, 205, generator=DRAW) > 0.3, is_causal=False),
    "bias": AttendConfig(mask=torch.randn(1, 4, 5, 205, generator=DRAW)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("spec", SPECS)
def test_attention_is_that_over_keys_made_of_what_is_held(spec, config, dtype):
    cache, v, q = empty(spec, dtype), tokens(205, dtype=dtype), tokens(5, 4, dtype)
    fill(cache, v[:, :, :200], [150, 1, 49])
    whole = torch.cat([cache.dequantize(0, "v"), v[:, :, 200:]], 2)
    step = fill(cache, v[:, :, 200:], [5])
    got = step.attend_made(q, config, Keys())
    wanted = attend_exact(Keys().make(whole, 0), whole, q, config)
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert got.dtype is dtype and error <= (1e-5 if dtype is torch.float32 else 0.02)


def test_new_tokens_are_attended_as_they_are_stored_where_that_is_asked_for():
    cache, v, q = empty("int:bits=4,window=0"), tokens(64), tokens(8, 4)
    config = AttendConfig(exact_new=False)
    fill(cache, v[:, :, :56], [56])
    step = cache.store(0, k=v[:, :, 56:, :0], v=v[:, :, 56:], config=config)
    whole = cache.dequantize(0, "v")
    wanted = attend_exact(Keys().make(whole, 0), whole, q, config)
    assert torch.allclose(step.attend_made(q, config, Keys()), wanted, atol=1e-5)


def test_padding_is_not_attended_to():
    cache, v, q = empty("turboquant:bits=4"), tokens(200), tokens(1, 4)
    padding = torch.tensor([30, 0])
    config = AttendConfig(padding=padding)
    step = cache.store(0, k=v[:, :, :150, :0], v=v[:, :, :150], config=config)
    step = fill(cache, v[:, :, 150:], [49, 1])
    got = step.attend_made(q, AttendConfig(), Keys())
    whole = torch.cat([cache.dequantize(0, "v")[:, :, :199], v[:, :, 199:]], 2)
    mask = torch.arange(200).view(1, 1, 1, -1) >= padding.view(-1, 1, 1, 1)
    wanted = attend_exact(Keys().make(whole, 0), whole, q, AttendConfig(mask=mask))
    assert (got - wanted).norm() <= 0.05 * wanted.norm()


@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_without_keys_is_copied_cut_and_saved_as_others_are(spec):
    cache, v = empty(spec), tokens(300)
    fill(cache, v, [1, 200, 5, 94])
    held = cache.dequantize(0, "v")
    again = empty(spec)
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    assert torch.equal(again.dequantize(0, "v"), held)
    assert again.dequantize(0, "k").shape == (2, HEADS, 300, 0)
    twin = cache.fork()
    twin.truncate(200)
    twin.reorder(torch.tensor([1, 0]))
    twin.repeat(2)
    twin.select(torch.tensor([0, 3]))
    assert torch.equal(cache.dequantize(0, "v"), held) and twin.seq_len(0) == 200
    assert twin.snapshot().select([1]).tokens == 200
    sizes = cache.stats()["bytes"]
    assert sizes["total"] == cache.memory_usage()


@pytest.mark.parametrize("spec", SPECS)
def test_it_takes_half_of_the_bytes_of_keys_and_values(spec):
    both = create_cache(spec, CacheGeometry(1, HEADS, WIDTH, WIDTH, dtype=torch.float32))
    alone, v = empty(spec), tokens(300)
    both.prefill(0, v, v)
    fill(alone, v, [300])
    v_bytes = sum(x.nbytes for x in both.entry(0).v.tensors())
    assert alone.memory_usage() == v_bytes
    assert alone.saved == pytest.approx(1 - v_bytes / (2 * v.nbytes))


def test_what_needs_keys_is_refused_by_name():
    cache, v = empty("none"), tokens(4)
    with pytest.raises(GeometryError, match=r"Step\.attend_made"):
        cache.attend(0, k=v[..., :0], v=v, q=v[..., :0])
    assert cache.seq_len(0) == 0
    with pytest.raises(GeometryError, match="pages hold K and V"):
        PagedKVCache("none", CacheGeometry(1, HEADS, 0, WIDTH), 4)
    with pytest.raises(GeometryError, match="latents have a width"):
        CacheGeometry(1, 1, 0, WIDTH, latent=True)
    with pytest.raises(GeometryError, match="v_head_dim"):
        CacheGeometry(1, HEADS, WIDTH, 0)
    with pytest.raises(GeometryError, match="head_dim"):
        CacheGeometry(1, HEADS, 0)
    with pytest.raises(BackendUnavailable, match="cpu"):
        create_cache("int:bits=8", CacheGeometry(1, HEADS, 0, WIDTH), backend="cpu")
    create_cache("int:bits=8", CacheGeometry(1, HEADS, 0, WIDTH), backend="torch")
