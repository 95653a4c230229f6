"""Attention never decompresses the whole cache (defect A7)."""

import pytest
from one_layer import fill, kvq

from kvpact.kernels import CHUNK, StreamPlan
from kvpact.methods.turboquant import TurboQuantCodec
from kvpact.testing.data import by_name


@pytest.fixture
def decoded_tokens(monkeypatch) -> list[int]:
    """Count the tokens of every decoding, and forbid decompressed keys and values."""
    counts: list[int] = []
    decode = TurboQuantCodec.decode

    def counted(self, arrays):
        y = decode(self, arrays)
        counts.append(y.shape[2])
        return y

    monkeypatch.setattr(TurboQuantCodec, "decode", counted)
    return counts


@pytest.mark.parametrize("spec", ["turboquant:bits=4", "turboquant:bits=3,center=128"])
@pytest.mark.parametrize("queries", [1, 40])
def test_attending_never_materialises_the_cache(decoded_tokens, monkeypatch, spec, queries):
    k, v, q = kvq(2100)
    cache = fill(spec, k, v, backend="torch")
    assert decoded_tokens == []  # nothing is read to store
    monkeypatch.setattr(StreamPlan, "decode", lambda *_: pytest.fail("decompressed"))
    new = [x[:, :, :queries] for x in (k, v, q)]
    cache.attend(0, **by_name(*new))
    if queries == 1:
        cache.decode(0, *new)
    assert max(decoded_tokens) <= CHUNK == 256
    # K and V, once each: nothing is decoded twice in a call.
    calls = 2 if queries == 1 else 1
    assert sum(decoded_tokens) <= calls * 2 * (2100 + CHUNK)
