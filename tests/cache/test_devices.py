"""Layers live on devices of their own: nothing computed once stays on the first (defect A10)."""

import pytest
import torch
from one_layer import METHODS, kvq

import kvpact
from kvpact import CacheGeometry
from kvpact.cache.batch import contiguous
from kvpact.errors import DeviceError
from kvpact.quantizers import numbers
from kvpact.testing.data import by_name


@pytest.mark.parametrize("spec", METHODS)
def test_a10_layers_may_live_on_different_devices(spec, monkeypatch):
    # The meta device stands for a second one: operations over two devices fail there, too. Checks
    # that look at values (finiteness) and the sinks' placement can't run on it; they are left out,
    # here only.
    spec += ",sinks=0" if ":" in spec else ":sinks=0"
    cache = kvpact.create_cache(spec, CacheGeometry(3, 2, 80))
    k, v, q = kvq(160, dim=80)
    output = cache.attend(0, k=k, v=v, q=q)  # the first layer, and the first use of every constant
    with monkeypatch.context() as patch:
        patch.setattr(numbers, "cast", lambda x, dtype, what: x.to(dtype))
        patch.setattr(contiguous, "check_tokens", lambda *_: None)
        far = [x.to("meta") for x in (k, v, q)]
        for _ in range(2):
            assert cache.attend(1, **by_name(*far)).device.type == "meta"
        result = cache.prefill(1, *far)
        assert result.k.device.type == result.v.device.type == "meta"
        assert cache.seq_len(1) == 480
        assert {t.device.type for t in cache._layers[1].tensors()} == {"meta"}
    # Layers on the first device go on as before, bit for bit.
    assert torch.equal(cache.attend(2, k=k, v=v, q=q), output)
    for layer in (0, 2):
        assert {t.device.type for t in cache._layers[layer].tensors()} == {"cpu"}


def test_a10_tensors_of_one_call_on_two_devices_are_refused():
    k, v, q = kvq(8)
    cache = kvpact.create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64))
    cache.prefill(0, k, v)
    for i in range(3):
        given = [k, v, q]
        given[i] = given[i].to("meta")
        with pytest.raises(DeviceError):
            cache.attend(0, **by_name(*given))
    assert cache.seq_len(0) == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("spec", METHODS)
def test_a10_a_model_over_two_real_devices_stores_the_same_bytes(spec):
    cache = kvpact.create_cache(spec, CacheGeometry(2, 2, 128))
    k, v, q = kvq(300, dim=128)
    for start, end in ((0, 200), (200, 300)):
        part = [x[:, :, start:end] for x in (k, v, q)]
        near = cache.attend(0, **by_name(*part))
        far = cache.attend(1, **by_name(*(x.cuda() for x in part)))
        torch.testing.assert_close(far.cpu(), near, rtol=1e-4, atol=1e-5)
    one, other = (layer.tensors() for layer in cache._layers)
    for near, far in zip(one, other, strict=True):
        assert far.is_cuda
        assert torch.equal(near.view(torch.uint8), far.cpu().view(torch.uint8))
