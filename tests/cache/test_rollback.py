"""A rollback to nothing leaves the cache as if the tokens had never come."""

import torch

from kvpact import AttendConfig, CacheGeometry, create_cache


def test_a_rollback_to_nothing_forgets_padding():
    """Rows of the next text are as long as it says: all of their tokens are attended."""
    x = torch.randn(1, 2, 20, 64, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    cache, fresh = (create_cache("int:bits=8", CacheGeometry(1, 2, 64)) for _ in range(2))
    cache.attend(0, k=x, v=x, q=x, config=AttendConfig(padding=torch.tensor([7, 0])))
    cache.truncate(0)
    assert torch.equal(cache.attend(0, k=x, v=x, q=x), fresh.attend(0, k=x, v=x, q=x))
    assert cache.entry(0).padding is None
