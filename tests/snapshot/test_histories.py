"""After any history a restored cache, of either layout, goes on as the one that never stopped."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from random_cases import HISTORIES

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, Snapshot, create_cache
from kvpact.errors import SpecError
from kvpact.spec import Spec
from kvpact.testing import method_specs, random_tokens
from kvpact.testing.data import by_name

ROWS, LAYERS, HEADS, DIM, V_DIM = 2, 2, 2, 16, 8
SPECS = dict.fromkeys(method_specs(), torch.float32) | {
    "none": torch.bfloat16, "fp8": torch.float16, "int:bits=3,sinks=0,window=0": torch.float32,
    "turboquant:bits=3,mode=prod,sinks=2,window=9": torch.float32,
    "turboquant:bits=3,center=64": torch.float32, "kivi:bits=2,sinks=3,window=40": torch.float16,
    "kvarn:bits=4,group=32,sinks=0,window=0/int:bits=8,sinks=5,window=70": torch.float32,
    "qjl": torch.float16, "lowrank:rank=6": torch.float32,
    "lowrank:energy=0.9,window=5": torch.float16, "hybrid:rank=6,window=3": torch.float32,
    "hybrid:rank=80": torch.float16,
}  # fmt: skip
APPEND = st.tuples(st.just("append"), st.integers(1, 70))
TRUNCATE = st.tuples(st.just("truncate"), st.floats(0, 1))
FORK = st.tuples(st.just("fork"), st.integers(1, 40))


def tokens(count: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    k = random_tokens(ROWS, HEADS, count, DIM, seed=seed, dtype=dtype, offset=1.0)
    v = random_tokens(ROWS, HEADS, count, V_DIM, seed=seed + 10**6, dtype=dtype)
    q = random_tokens(ROWS, 2 * HEADS, count, DIM, seed=seed + 10**7, dtype=dtype)
    return k, v, q


def attend(cache, count: int, seed: int, dtype: torch.dtype, padding=None) -> list[torch.Tensor]:
    config = AttendConfig(padding=padding)
    given = [by_name(*tokens(count, seed + 100 * layer, dtype)) for layer in range(LAYERS)]
    return [cache.attend(layer, **x, config=config) for layer, x in enumerate(given)]


def make(layout: str, spec: str, dtype: torch.dtype, calibration):
    geometry = CacheGeometry(LAYERS, HEADS, DIM, V_DIM, dtype)
    if layout == "contiguous":
        return create_cache(spec, geometry)
    return PagedKVCache(spec, geometry, 90, calibration=calibration).view()


def is_to_learn(snapshot: Snapshot) -> bool:
    """Tell whether some method of a snapshot learns, and has not yet."""
    state, spec = snapshot.layer(0), Spec.from_json(snapshot.layer(0).spec)
    codecs = (spec.key.key_codec(DIM, state.streams[0].tail.dtype),
              spec.value.value_codec(V_DIM, state.streams[1].tail.dtype))  # fmt: skip
    return any(not c.ready and not s.learnt for c, s in zip(codecs, state.streams, strict=True))


def run(cache, steps, dtype: torch.dtype) -> list:
    """Carry out a history; return the forks that have to stay alive."""
    alive = []
    for number, (what, amount) in enumerate(steps):
        if what == "append":
            attend(cache, amount, 1000 * number, dtype)
        elif what == "truncate":
            cache.truncate(int(amount * cache.seq_len(0)))
        else:
            alive.append(cache.fork())
            attend(alive[-1], amount, 1000 * number, dtype)
    return alive


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("spec", SPECS)
@settings(HISTORIES, max_examples=5)
@given(
    first=st.integers(1, 150),
    padding=st.booleans(),
    steps=st.lists(st.one_of(APPEND, TRUNCATE, FORK), max_size=6),
    after=st.lists(st.one_of(st.integers(1, 66), st.floats(0, 1)), min_size=1, max_size=3),
    page=st.sampled_from([None, 1, 3]),
)
def test_goes_on_as_if_it_had_never_stopped(layout, spec, first, padding, steps, after, page):
    dtype = SPECS[spec]
    seen = {layer: tokens(100, 7, dtype)[:2] for layer in range(LAYERS)}
    cache = make(layout, spec, dtype, seen)
    attend(cache, first, 5, dtype, torch.tensor([min(3, first), 0]) if padding else None)
    alive = run(cache, steps, dtype)
    whole = cache.snapshot()
    assert cache.snapshot().digest == whole.digest
    size = None if page is None else page * 128
    data = cache.snapshot(page_size=size).to_bytes()
    copies = []
    for kind in ("contiguous", "paged"):
        if kind == "paged" and is_to_learn(whole):
            # What one sequence is going to learn could not be shared with others.
            with pytest.raises(SpecError, match="not fitted yet"):
                make(kind, spec, dtype, whole)
            continue
        copy = make(kind, spec, dtype, Snapshot.from_bytes(data))
        attend(copy, 3, 99, dtype)  # what is there goes
        copy.restore(Snapshot.from_bytes(data))
        copies.append(copy)
    row = make("contiguous", spec, dtype, None)
    row.restore(Snapshot.from_bytes(data).select([1]))
    alone = make("contiguous", spec, dtype, None)
    alone.restore(Snapshot.from_bytes(data))
    alone.select(torch.tensor([1]))
    # What is learnt from now on is learnt of other rows, too, where there are some.
    as_in_batch = not is_to_learn(whole)
    for number, step in enumerate(after):
        if isinstance(step, float):
            length = int(step * cache.seq_len(0))
            for one in (cache, *copies, row, alone):
                one.truncate(length)
            continue
        wanted = attend(cache, step, 5000 + number, dtype)
        for one in copies:
            got = attend(one, step, 5000 + number, dtype)
            if one.layout == layout:
                assert all(map(torch.equal, got, wanted))
            # A matrix product may round differently for another number of rows.
            for x, y in zip(got, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        for layer in range(LAYERS):
            k, v, q = (x[1:] for x in tokens(step, 5000 + number + 100 * layer, dtype))
            got = row.attend(layer, k=k, v=v, q=q)
            assert torch.equal(got, alone.attend(layer, k=k, v=v, q=q))
            if as_in_batch:
                torch.testing.assert_close(got, wanted[layer][1:], rtol=2e-2, atol=2e-2)
    final = states(cache.snapshot())
    # `is True`: the bytes themselves would make a long message.
    assert all(states(one.snapshot()) == final for one in copies) is True
    assert (states(row.snapshot()) == states(alone.snapshot().select([0]))) is True
    if as_in_batch:
        assert (states(row.snapshot()) == states(cache.snapshot().select([1]))) is True
    del alive


def states(snapshot: Snapshot) -> tuple:
    """All that a snapshot holds but the name of the layout, as something that can be compared."""
    container = snapshot._container
    manifest = {name: x for name, x in container.manifest.items() if name != "layout"}
    return manifest, bytes(container.buffer[container._data :])
