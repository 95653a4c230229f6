"""A `Step` reads the past under its layer's lock: nobody rolls it back meanwhile."""

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.cache.stream.segments import SegmentList


class Lock:
    """A lock that knows whether it is held."""

    held = False

    def __enter__(self):
        self.held = True

    def __exit__(self, *_):
        self.held = False


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("how", ["attend", "dequantize"])
def test_the_past_is_read_under_the_lock(how, kernel, monkeypatch):
    x = torch.randn(1, 2, 130, 64, generator=torch.Generator().manual_seed(0))
    spec = "turboquant:bits=4,sinks=0,window=0"
    cache = create_cache(spec, CacheGeometry(1, 2, 64), backend=kernel)
    cache.store(0, k=x, v=x)
    step = cache.store(0, k=x[:, :, :1], v=x[:, :, :1])
    assert step.lock is cache._layers[0].lock
    lock, seen = Lock(), []

    def watch(owner, name):
        method = getattr(owner, name)

        def spy(self, *args):
            seen.append(lock.held)
            return method(self, *args)

        monkeypatch.setattr(owner, name, spy)

    watch(SegmentList, "gather")  # torch
    watch(SegmentList, "where")  # native kernels
    step = step._replace(lock=lock)
    if how == "attend":
        step.attend(x[:, :, :1], AttendConfig())
    else:
        assert step.dequantize(None, AttendConfig()).k.shape[2] == 131
    assert seen and all(seen) and not lock.held
