"""A rollback inside the window leaves the cache as if the tokens had never come."""

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache

GROUPED = ["turboquant:bits=3,center=64", "turboquant:bits=2,center=128,window=40",
           "kvarn:bits=3", "kivi:bits=2,window=33"]  # fmt: skip


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 2, count, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", GROUPED)
def test_window_is_what_the_spec_says(spec):
    """Tokens kept for rollbacks are not attended exactly: the window is as wide as it says."""
    x = tokens(330, 0)
    cache = create_cache(spec, CacheGeometry(1, 2, 64))
    cache.prefill(0, x, x)
    window = cache.specs[0].key.window
    stored = min(330 - window, 330 // 128 * 128)
    for got in [cache.dequantize(0, side) for side in ("k", "v")]:
        exact = (got == x).all(-1).all(1)[0]
        assert exact[330 - window :].all() and not exact[4:stored].any()


def test_a_rollback_to_nothing_forgets_padding():
    """Rows of the next text are as long as it says: all of their tokens are attended."""
    x = tokens(20, 0).repeat(2, 1, 1, 1)
    cache, fresh = (create_cache("int:bits=8", CacheGeometry(1, 2, 64)) for _ in range(2))
    cache.attend(0, k=x, v=x, q=x, config=AttendConfig(padding=torch.tensor([7, 0])))
    cache.truncate(0)
    assert torch.equal(cache.attend(0, k=x, v=x, q=x), fresh.attend(0, k=x, v=x, q=x))
    assert cache.entry(0).padding is None
