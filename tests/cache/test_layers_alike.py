"""Layers that are alike share what they are made with, and nothing else."""

from itertools import product

import pytest
import torch
from closeness import WHOLE_BOUND, error

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import CacheFull, DtypeError, GeometryError, NonFiniteError
from kvpact.testing.data import by_name

LAYERS = 3


def qkv(tokens, seed, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, tokens, 64) for heads in (2, 2, 6)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def cache_of(spec, layers, **options):
    return create_cache(spec, CacheGeometry(layers, 2, 64), **options)


@pytest.mark.parametrize(
    ("side", "number"), [*product((0, 1), (torch.nan, torch.inf, 1e30)), (2, torch.nan)]
)
def test_what_can_not_be_stored_is_refused_by_the_second_layer_too(side, number):
    cache = cache_of("trellis:bits=4", LAYERS)
    cache.attend(0, **by_name(*qkv(20, 0)))
    bad = qkv(20, 1)
    bad[side][1, 1, 7, 5] = number
    with pytest.raises(NonFiniteError):
        cache.attend(1, **by_name(*bad))
    assert cache.seq_len(1) == 0
    right = cache_of("trellis:bits=4", 1).attend(0, **by_name(*qkv(20, 1)))
    torch.testing.assert_close(cache.attend(1, **by_name(*qkv(20, 1))), right, rtol=0, atol=1e-6)


def test_other_batches_and_dtypes_are_refused_by_the_second_layer_too():
    cache = cache_of("trellis:bits=4", LAYERS)
    cache.attend(0, **by_name(*qkv(20, 0)))
    with pytest.raises(GeometryError, match="batch 3"):
        cache.attend(1, **by_name(*qkv(20, 1, batch=3)))
    k, v, q = qkv(20, 1)
    with pytest.raises(DtypeError):
        cache.attend(1, k=k, v=v.half(), q=q)
    cache.reset()
    cache.attend(0, **by_name(*qkv(500, 0, batch=3)))
    with pytest.raises(GeometryError, match="batch 2"):
        cache.attend(1, **by_name(*qkv(20, 1)))
    assert cache.attend(1, **by_name(*qkv(20, 1, batch=3))).shape == (3, 6, 20, 64)


def test_calls_with_other_rules_are_their_own():
    """A window, a mask or padding of the second layer is honoured."""
    mask = torch.ones(1, 1, 20, 20).tril() > 0
    for rules in (
        {"sliding_window": 5}, {"mask": mask, "is_causal": False}, {"exact_new": False},
        {"padding": torch.tensor([3, 0])}, {"softmax_scale": 0.3, "softcap": 20.0},
    ):  # fmt: skip
        config = AttendConfig(**rules)
        cache, alone = cache_of("trellis:bits=4", 2), cache_of("trellis:bits=4", 1)
        cache.attend(0, **by_name(*qkv(20, 0)))
        given = by_name(*qkv(20, 1))
        outputs = cache.attend(1, **given, config=config), alone.attend(0, **given, config=config)
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
        assert torch.equal(cache.dequantize(1, "k"), alone.dequantize(0, "k"))


def test_a_full_cache_stays_full():
    cache = cache_of("trellis:bits=4", LAYERS, max_tokens=25)
    cache.attend(0, **by_name(*qkv(20, 0)))
    with pytest.raises(CacheFull):
        cache.attend(1, **by_name(*qkv(26, 1)))
    assert cache.seq_len(1) == 0


def test_sinks_whose_channels_have_gaps_are_kept_for_the_second_layer():
    """What the arguments of a step point to lives as long as they, copies too."""
    together, alone = cache_of("trellis:bits=4", 2), cache_of("trellis:bits=4", 1, backend="torch")
    for layer in range(2):
        k, v, q = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(130, layer))
        together.attend(layer, k=k, v=v, q=q)
    alone.attend(0, k=k, v=v, q=q)
    for step in range(1, 40):
        for layer in range(2):
            given = qkv(1, 2 * step + layer)
            output = together.attend(layer, **by_name(*given))
        assert error(alone.attend(0, **by_name(*given)), output) <= WHOLE_BOUND


def test_sink_logits_of_another_dtype_are_kept_for_every_layer():
    config = AttendConfig(sink_logits=torch.linspace(-1, 1, 6).bfloat16())
    together, alone = cache_of("trellis:bits=4", 2), cache_of("trellis:bits=4", 1, backend="torch")
    for step, new in enumerate((20, *[1] * 5)):
        for layer in range(2):
            given = qkv(new, 2 * step + layer)
            output = together.attend(layer, **by_name(*given), config=config)
        if step == 3:
            together.entry(0).truncate(5)
        right = alone.attend(0, **by_name(*given), config=config)
        torch.testing.assert_close(output, right, rtol=0, atol=2e-6)
