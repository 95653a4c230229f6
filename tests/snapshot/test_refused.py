"""Snapshots with valid checksums that no cache wrote, and odd ones that every cache has to read."""

import os
from dataclasses import replace

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, Snapshot, create_cache
from kvpact.errors import FormatError, MismatchError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.snapshot import LayerState
from kvpact.testing import random_tokens


def filled(spec: str, dim: int, tokens: int = 40, dtype=torch.float16, heads: int = 2):
    cache = create_cache(spec, CacheGeometry(2, heads, dim, dtype=dtype))
    for layer in range(2):
        shape = (1, heads, tokens, dim)
        k, v = (random_tokens(*shape, seed=2 * layer + x, dtype=dtype) for x in (0, 1))
        cache.prefill(layer, k, v)
    return cache


@pytest.mark.parametrize("dim", [1, 3, 5])
@pytest.mark.parametrize("spec", [
    "turboquant:bits=4,center=128,window=0", "kivi:bits=2,group=32,window=0", "int:bits=3,window=0",
    "kvarn:bits=3,group=32,window=0",
])  # fmt: skip
def test_a_page_alone_with_fields_at_odd_offsets_is_restored(spec, dim):
    cache = filled(spec, dim, heads=1)
    held = Snapshot.from_bytes(cache.snapshot(page_size=128).to_bytes())
    assert held.manifest.pages == 1
    again = create_cache(spec, cache.geometry)
    again.restore(held)
    assert again.snapshot(page_size=128).to_bytes() == held.to_bytes()


LEARN = ["vq:codebook_size=20", "lowrank:rank=3", "hybrid:rank=3"]


def rebuilt(held: Snapshot, layers: list[LayerState]) -> Snapshot:
    """Return a snapshot of other states, with checksums of its own."""
    m = held.manifest
    shape = {"geometry": m.geometry, "layout": m.layout, "page_size": m.page_size}
    return Snapshot.build(layers, slots=FORMAT_VERSION, **shape)


def test_exact_tokens_that_could_not_be_packed_are_refused():
    cache = filled("kivi:bits=4", 16, dtype=torch.bfloat16)
    held = cache.snapshot()
    first, second = (held.layer(index) for index in range(2))
    k, v = first.streams
    large = replace(k, tail=torch.full_like(k.tail, 1e6))
    with pytest.raises(FormatError, match="beyond the 65504"):
        cache.restore(rebuilt(held, [replace(first, streams=(large, v)), second]))


def test_a_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("No snapshot, but a text of more than a few bytes.")
    with pytest.raises(FormatError, match=r"notes\.txt: .*header"):
        Snapshot.load(path)


def without_state(held: Snapshot) -> Snapshot:
    """Return a snapshot that lacks what its codecs learnt."""
    layers = []
    for index in range(held.num_layers):
        layer = held.layer(index)
        assert layer.streams is not None and layer.streams[0].learnt
        k, v = (replace(stream, learnt={}) for stream in layer.streams)
        layers.append(replace(layer, streams=(k, v)))
    return rebuilt(held, layers)


@pytest.mark.parametrize("spec", LEARN)
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_packed_slots_without_what_their_method_learnt_are_refused(spec, layout):
    cache = filled(spec, 16, tokens=200, dtype=torch.float32)
    held = cache.snapshot()
    damaged = without_state(held)
    if layout == "contiguous":
        again = create_cache(spec, cache.geometry)
        with pytest.raises(FormatError, match="learnt"):
            again.restore(damaged)
        assert again.seq_len(0) == 0 and again.memory_usage() == 0
        again.restore(held)
    else:
        pages = PagedKVCache(spec, cache.geometry, 8, page_size=128, calibration=held)
        with pytest.raises(MismatchError, match="learnt"):
            pages.restore(damaged)
        assert pages.restore(held) == 0


@pytest.mark.parametrize("call", [Snapshot.open, Snapshot.load])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path, call):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(FormatError, match=f"{path} is no regular file"):
            call(path)
