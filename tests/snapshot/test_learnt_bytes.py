"""What codecs learnt is counted after a restore, too."""

import pytest
import torch

from kvpact import CacheGeometry, create_cache
from kvpact.testing import random_tokens
from kvpact.testing.held import held_bytes


@pytest.mark.parametrize("same", [True, False], ids=["calibrated alike", "calibrated otherwise"])
def test_what_a_calibrated_cache_learnt_is_counted_after_a_restore(same):
    """Its own codecs stay for tokens after a reset, so their state is held, too."""
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float32)
    k, v = random_tokens(1, 2, 200, 32), random_tokens(1, 2, 200, 32, seed=1)
    saved = create_cache("lowrank:rank=8", geometry, calibration={0: (k, v)})
    saved.prefill(0, k, v)
    other = (k, v) if same else (v, k)
    cache = create_cache("lowrank:rank=8", geometry, calibration={0: other})
    cache.restore(saved.snapshot())
    assert cache.memory_usage() == held_bytes(cache) == cache.stats()["bytes"]["total"]
    assert (cache.memory_usage() == saved.memory_usage()) is same
