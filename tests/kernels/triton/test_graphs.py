"""Decode steps know no more than what the host knew when they were captured.

On a GPU a CUDA graph is replayed; interpreted, a step runs again with the host's old counts.
"""

from types import SimpleNamespace

import pytest
import torch
from host_reads import HostReads
from tiny_llama import tiny_llama

pytest.importorskip("triton")

from kvpact.errors import BackendUnavailable, GeometryError, NonFiniteError
from kvpact.integrations.transformers import CompressedCache, graphs
from kvpact.integrations.transformers.graphs import DecodeGraph
from kvpact.integrations.transformers.versions import named

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_replays_are_the_steps_of_the_model(triton_backend):
    model = tiny_llama(128).to(DEVICE)
    ids = torch.randint(0, 64, (1, 90), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits, caches = [], []
    for backend in ("torch", "triton"):
        spec = "turboquant:bits=4/int:bits=8,window=20"
        cache = CompressedCache(model, spec, backend=backend, check="deferred")
        with torch.no_grad():
            model(ids[:, :40], **named(cache))
        caches.append(cache)
    steps = DecodeGraph(model, caches[1], room=4)
    for at in range(40, 46):
        token = ids[:, at : at + 1]
        with torch.no_grad():
            logits.append(model(token, **named(caches[0])).logits)
        found = steps(token)
        assert (found - logits[-1]).norm() <= 1e-3 * logits[-1].norm()
    assert steps.replays == 6 and steps.captures == 2
    assert [cache.get_seq_length() for cache in caches] == [46, 46]
    held = [cache.held() for cache in caches]
    for layer in range(2):
        for side in "kv":
            one, other = (cache.dequantize(layer, side) for cache in held)
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    caches[1].verify()
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 46]] = torch.nan
    steps(ids[:, 46:47])
    assert steps.replays == 7
    with pytest.raises(NonFiniteError, match="deferred"):
        caches[1].verify()


def test_steps_that_pack_a_group_run_as_ever_and_rollbacks_are_seen(triton_backend):
    model = tiny_llama(128).to(DEVICE)
    ids = torch.randint(0, 64, (1, 90), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = (model, "kivi:bits=4,group=32,sinks=0,window=32")
    caches = [CompressedCache(*given, backend=x, check="deferred") for x in ("torch", "triton")]
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :62], **named(cache))
    steps = DecodeGraph(model, caches[1])
    for at in (62, 63, 64, 63, 64):
        token = ids[:, at : at + 1]
        if caches[0].get_seq_length() > at:
            for cache in caches:
                cache.crop(at - cache.get_seq_length())
        with torch.no_grad():
            expected = model(token, **named(caches[0])).logits
        done = steps.replays, steps.captures
        with HostReads() as reads:
            found = steps(token)
        if (steps.replays, steps.captures) == (done[0] + 1, done[1]):
            assert not reads.counts
        assert (found - expected).norm() <= 1e-3 * expected.norm()
    # Where a group was packed exact tokens lie elsewhere: the graph of before is not replayed.
    assert (steps.replays, steps.captures) == (4, 3)


def test_a_machine_without_triton_is_told(monkeypatch):
    monkeypatch.setattr(graphs, "installed", lambda: "")
    with pytest.raises(BackendUnavailable, match="pip install"):
        DecodeGraph(None, SimpleNamespace(stands=False))


def test_what_can_not_be_captured_is_refused(triton_backend):
    model = tiny_llama(64).to(DEVICE)
    ids = torch.zeros(1, 9, dtype=torch.int64, device=DEVICE)
    cache = CompressedCache(model, "int:bits=8", backend="torch", check="deferred")
    with pytest.raises(GeometryError, match="room"):
        DecodeGraph(model, cache, room=0)
    steps = DecodeGraph(model, cache)
    with pytest.raises(GeometryError, match="empty"):
        steps(ids[:, :1])
    with torch.no_grad():
        model(ids, **named(cache))
    with pytest.raises(BackendUnavailable, match="check='deferred'"):
        steps(ids[:, :1])
    assert cache.get_seq_length() == 9
    with pytest.raises(GeometryError, match="one token"):
        steps(ids[:, :2])
