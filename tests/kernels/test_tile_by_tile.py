"""Attention never decompresses the whole cache (defect A7)."""

import pytest
from one_layer import fill, kvq

from kvpact.kernels import CHUNK, StreamPlan
from kvpact.kernels.cpu.library import _load
from kvpact.methods.turboquant_codec import TurboQuantCodec
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


@pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")
def test_the_native_kernel_decodes_nothing_outside_of_it(decoded_tokens):
    k, v, q = kvq(2100)
    cache = fill("turboquant:bits=4", k, v, backend="cpu")
    cache.decode(0, *(x[:, :, :1] for x in (k, v, q)))
    assert cache.stats()["compute"]["attend"] == {"cpu": 1}
    assert decoded_tokens == []


def test_a_prefill_decompresses_what_is_read_and_no_more(decoded_tokens):
    k, v, q = kvq(1000)
    cache = fill("turboquant:bits=4", k, v, backend="torch")
    result = cache.prefill(0, k[:, :, :300], v[:, :, :300], q[:, :, :300])
    assert decoded_tokens == []
    ends = []
    for tile in result.tiles():
        assert tile.k.shape[2] == tile.v.shape[2] == tile.end - tile.start <= CHUNK
        ends.append((tile.start, tile.end))
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == 1300
    assert max(decoded_tokens) <= CHUNK
