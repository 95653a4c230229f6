"""Methods that learn from tokens on pages: what was learnt is fixed, shared and counted."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.errors import SpecError
from kvpact.testing import example_specs

GEOMETRY = CacheGeometry(2, 2, 64, v_head_dim=80)
SPECS = list(example_specs(fitted=True))


def tokens(count: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(1, heads, count, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_the_contiguous_cache_that_learnt_the_same(spec):
    k, v, q = tokens(200, 2, 64, 0), tokens(200, 2, 80, 1), tokens(1, 4, 64, 2)
    calibration = {0: (k, v), 1: (k, v)}
    paged = PagedKVCache(spec, GEOMETRY, 16, calibration=calibration)
    contiguous = create_cache(spec, GEOMETRY, calibration=calibration)
    seqs = [paged.allocate(), paged.allocate()]
    for layer in range(2):
        for seq in seqs:
            paged.append(layer, {seq: (k[0], v[0])})
        contiguous.prefill(layer, k, v)
    got = paged.view(seqs[:1]).attend(0, k=k[:, :, :1], v=v[:, :, :1], q=q)
    assert torch.equal(got, contiguous.attend(0, k=k[:, :, :1], v=v[:, :, :1], q=q))
    stats = paged.stats()
    assert stats["bytes"]["total"] == sum(
        stats["bytes"][part] for part in ("codes", "side", "sinks", "window", "unused")
    )
    learnt = sum(t.nbytes for pair in paged.pool.codecs for c in pair for t in c.state().values())
    assert 0 < learnt <= stats["bytes"]["side"]
    for seq in seqs:
        paged.free(seq)
    assert paged.num_free_pages == 16
    assert paged.memory_usage() == learnt + sum(t.nbytes for t in paged.pool.tensors())


@pytest.mark.parametrize("spec", SPECS)
def test_not_fitted_is_refused(spec):
    with pytest.raises(SpecError, match="not fitted"):
        PagedKVCache(spec, GEOMETRY, 16)
    with pytest.raises(SpecError, match="not fitted"):
        PagedKVCache(
            spec, GEOMETRY, 16, calibration={0: (tokens(9, 2, 64, 0), tokens(9, 2, 80, 1))}
        )
