"""Attention over the few tokens that a mask lets through is attention by the mask."""

from dataclasses import replace

import pytest
import torch
from closeness import WHOLE_BOUND, error

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import BackendUnavailable, DtypeError
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.library import _load
from kvpact.kernels.sources import Pick, copy_slots
from kvpact.testing.specs import example_specs

BACKENDS = ["torch"] + ([] if isinstance(_load(), str) else ["cpu"])
HEADS, GROUPS, DIM, TOTAL = 2, 3, 64, 411
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def filled(spec, backend, latent=False, batch=2, padding=None):
    generator = torch.Generator().manual_seed(0)
    heads, rope = (1, 32) if latent else (HEADS, DIM)
    geometry = CacheGeometry(1, heads, DIM, rope, torch.float32, latent)
    cache = create_cache(spec, geometry, backend=backend)
    k = torch.randn(batch, heads, TOTAL, DIM, generator=generator)
    v = torch.randn(batch, heads, TOTAL, rope, generator=generator)
    config = AttendConfig(padding=padding)
    cache.prefill(0, k[:, :, :-1], v[:, :, :-1], None, config)
    width = DIM + rope if latent else DIM
    q = torch.randn(batch, HEADS * GROUPS, 1, width, generator=generator)
    return cache, k[:, :, -1:], v[:, :, -1:], q


def both(cache, k, v, q, mask, **more):
    """Attend by the mask and to the chosen alone; return outputs and how often the latter ran."""
    config = AttendConfig(mask=mask, is_causal=False, softmax_scale=0.2, **more)
    twin = cache.fork()
    wanted = twin.attend(0, k=k, v=v, q=q, config=config)
    got = cache.attend(0, k=k, v=v, q=q, config=replace(config, sparse=True))
    counts = cache.stats()["compute"]["attend"]
    return wanted, got, sum(n for name, n in counts.items() if "chosen" in name)


def some(batch, heads, queries, count, unit=1):
    """Return a mask that lets other tokens through for each row, head and query."""
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(batch, heads, queries, -(-TOTAL // unit), generator=generator).argsort(-1)
    return (order < count).repeat_interleave(unit, -1)[..., :TOTAL]


@each_backend
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "turboquant:bits=4/int:bits=8", "int:bits=3,window=5,sinks=7/int:bits=8,window=40,sinks=2",
        "none", "fp8", "trellis:bits=4/int:bits=8", "int:bits=8,window=0,sinks=0",
    ],
)  # fmt: skip
def test_tokens_of_each_row(spec, latent, backend):
    cache, k, v, q = filled(spec, backend, latent)
    for queries in (1, 3):
        mask = some(2, 1, queries, 40)
        mask[..., [0, 2, -1]] = True  # sink tokens and the new one
        given = (torch.cat([x] * queries, 2) for x in (k, v, q))
        if queries == 3:
            mask = torch.cat([mask[..., :-1], mask[..., :3]], -1)
        wanted, got, ran = both(cache.fork(), *given, mask)
        assert error(wanted, got) <= WHOLE_BOUND
    assert ran == (1 if queries == 1 else 2) or "trellis" in spec
    assert (ran == 0) == ("trellis" in spec)


@each_backend
@pytest.mark.parametrize("spec", example_specs())
def test_blocks_of_each_head(spec, backend):
    """Whole units of slots are copied, whatever a codec stores."""
    try:
        cache, k, v, q = filled(spec, backend, batch=1)
    except BackendUnavailable:
        return
    for mask in some(1, HEADS, 1, 1, unit=128).repeat_interleave(GROUPS, 1), some(1, 1, 1, 30):
        wanted, got, ran = both(cache.fork(), k, v, q, mask)
        assert error(wanted, got) <= WHOLE_BOUND
        assert ran or mask.shape[1] == 1, "single tokens of some codecs share what is stored"


@each_backend
def test_what_else_a_call_says(backend):
    padding = torch.tensor([0, 200])
    cache, k, v, q = filled("turboquant:bits=4/int:bits=8", backend, padding=padding)
    mask = some(2, HEADS * GROUPS, 1, 30)
    numbers = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
    additive = numbers.masked_fill(~mask, torch.finfo(torch.float32).min)
    sinks = torch.linspace(-1, 1, HEADS * GROUPS)
    for given, more in (
        (mask, {}), (mask[:1, :1], {"softcap": 3.0}), (additive, {"sink_logits": sinks}),
    ):  # fmt: skip
        wanted, got, ran = both(cache.fork(), k, v, q, given, **more)
        assert ran and error(wanted, got) <= WHOLE_BOUND


@each_backend
def test_where_the_mask_is_the_quicker_way_or_nothing_is_seen(backend):
    cache, k, v, q = filled("turboquant:bits=4/int:bits=8", backend)
    none = torch.zeros(2, 1, 1, TOTAL, dtype=torch.bool)
    for mask in (~none, none, some(2, 1, 1, TOTAL // 2 + 2)):
        wanted, got, ran = both(cache.fork(), k, v, q, mask)
        assert torch.equal(wanted, got) and not ran
    with pytest.raises(DtypeError, match="sparse"):
        AttendConfig(sparse=1)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the native kernels are not built")
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("spec", ["int:bits=5/int:bits=8", "fp8", "none", "kivi:bits=2,group=32"])
def test_copies_are_the_torch_bodys_to_the_byte(spec, units):
    cache, *_ = filled(spec, "torch")
    for stream in (cache.entry(0).k, cache.entry(0).v):
        source = stream.store.source()
        for field in stream.codec.fields:
            if not units and field.places is None:
                continue
            count = 5 if units else 37
            generator = torch.Generator().manual_seed(count)
            most = 300 // field.tokens if units else 300
            items = torch.randperm(most, generator=generator)[:count].sort().values
            pick = Pick(field, 1, slice(1, 2), items, units)
            found = pick.new(torch.device("cpu")), pick.new(torch.device("cpu"))
            copy_slots(source, pick, found[0])
            CPU.copy_slots(source, pick, found[1])
            one, other = (x.view(torch.uint8) for x in found)
            assert torch.equal(one, other) and one.any()
