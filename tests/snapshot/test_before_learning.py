"""A cache that is saved before its codecs have learnt goes on as if it had never stopped."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, Snapshot, create_cache
from kvpact.errors import FormatError, GeometryError, MismatchError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.snapshot import LayerState
from kvpact.snapshot.manifest import VERSION, WITH_ENERGIES
from kvpact.snapshot.parts import stack_rows
from kvpact.testing import held_bytes, random_tokens

GEOMETRY = CacheGeometry(2, 2, 32, 16, dtype=torch.float32)
SPEC = "trellis:bits=3,sinks=2,window=5"
SHAPE = (torch.arange(32.0) % 7 + 1).view(1, 1, 1, -1)
"""Of the queries' channels, so that it matters which queries were seen."""


def attend(cache, count: int, seed: int = 0, padding: list[int] | None = None) -> None:
    config = AttendConfig(padding=None if padding is None else torch.tensor(padding))
    for layer in range(2):
        k = random_tokens(2, 2, count, 32, seed=seed + layer, offset=1.0)
        v = random_tokens(2, 2, count, 16, seed=seed + 10 + layer)
        q = random_tokens(2, 4, count, 32, seed=seed + 20 + layer) * SHAPE ** (1 - 2 * layer)
        cache.attend(layer, k, v, q, config)


def started(tokens: int, spec: str = SPEC):
    cache = create_cache(spec, GEOMETRY)
    attend(cache, tokens, padding=[3, 0])
    return cache


def again(snapshot: Snapshot, spec: str = SPEC):
    cache = create_cache(spec, GEOMETRY)
    cache.restore(Snapshot.from_bytes(snapshot.to_bytes()))
    return cache


def goes_on(cache) -> bytes:
    """Return all bytes of the cache after more tokens than it learns from."""
    attend(cache, 10, 100)
    for seed in range(3):
        attend(cache, 1, 200 + seed)
    attend(cache, 60, 300)
    snapshot = cache.snapshot()
    assert snapshot.layer(1).streams[0].learnt
    return snapshot.to_bytes()


@pytest.mark.parametrize("spec", [SPEC, "trellis:bits=4,center=0", "trellis:bits=2,first=false"])
@pytest.mark.parametrize("tokens", [1, 40, 63])
def test_goes_on_to_the_same_bytes(spec, tokens):
    cache = started(tokens, spec)
    restored = again(cache.snapshot(), spec)
    assert restored.memory_usage() == held_bytes(restored) == restored.stats()["bytes"]["total"]
    assert (goes_on(restored) == goes_on(cache)) is True


def change_nothing(cache) -> None:
    pass


def roll_back(cache) -> None:
    cache.truncate(20)


def roll_back_all(cache) -> None:
    cache.truncate(0)


def swap_rows(cache) -> None:
    cache.select(torch.tensor([1, 0]))


def leave_queries_out(cache) -> None:
    for layer in range(2):
        k, v = random_tokens(2, 2, 9, 32, seed=layer), random_tokens(2, 2, 9, 16, seed=layer + 5)
        cache.prefill(layer, k, v)


@pytest.mark.parametrize("after", [change_nothing, roll_back, swap_rows, leave_queries_out])
@pytest.mark.parametrize("before", [roll_back, roll_back_all, swap_rows, leave_queries_out])
def test_whatever_came_before_and_after(before: Callable, after: Callable):
    cache = started(40)
    before(cache)
    fork, restored = cache.fork(), again(cache.snapshot())
    for one in (cache, fork, restored):
        after(one)
    wanted = goes_on(cache)
    assert (goes_on(restored) == wanted) is True
    assert (goes_on(again(fork.snapshot())) == wanted) is True


def test_rows_take_their_own_queries_along():
    cache = started(40)
    row = again(cache.snapshot().select([0]).select([0, 0]))
    cache.select(torch.tensor([0, 0]))
    assert (goes_on(row) == goes_on(cache)) is True


def test_a_prefix_of_no_tokens_has_no_queries():
    prefix = started(40).snapshot().slice(0, 0)
    assert prefix.layer(0).streams[0].query_energy is None
    assert (goes_on(again(prefix)) == goes_on(again(prefix))) is True


def changed(snapshot: Snapshot, **values) -> Snapshot:
    """Return a snapshot with other state of keys, and checksums of its own."""
    layers = []
    for index in range(snapshot.num_layers):
        layer = snapshot.layer(index)
        k, v = layer.streams
        layers.append(replace(layer, streams=(replace(k, **values), v)))
    m = snapshot.manifest
    return Snapshot.build(
        layers, slots=FORMAT_VERSION, geometry=m.geometry, layout=m.layout, page_size=m.page_size
    )


def test_the_queries_matter():
    """Without them other weights are learnt: what the tests above rest on."""
    held = started(40).snapshot()
    assert (goes_on(again(changed(held, query_energy=None))) == goes_on(again(held))) is False


def test_version_3_is_of_those_alone_that_have_seen_queries():
    cache = started(40)
    held = cache.snapshot()
    assert held.manifest.version == WITH_ENERGIES
    assert held.manifest.layers[0].streams[0].query_energy == 40
    assert held.layer(1).streams[0].query_energy.shape == (2, 2, 40, 32)
    assert held.sizes()["query energies"] == 2 * 2 * 2 * 40 * 32 * 4
    assert sum(held.sizes().values()) == held.nbytes
    cache.truncate(0)
    assert cache.snapshot().manifest.version == VERSION
    attend(cache, 64)
    assert cache.snapshot().manifest.version == VERSION
    assert "query energies" not in cache.snapshot().sizes()


def energy(number: float = 1.0, tokens: int = 40) -> torch.Tensor:
    return torch.full((2, 2, tokens, 32), number)


@pytest.mark.parametrize(
    ("tokens", "number", "message"),
    [
        (40, torch.nan, "energies of queries"),
        (40, torch.inf, "energies of queries"),
        (40, -1.0, "energies of queries"),
        (70, 1.0, "beside what was learnt"),
    ],
)
def test_energies_that_no_cache_has_seen_are_refused(tokens, number, message):
    cache = started(20)
    held = cache.snapshot().to_bytes()
    with pytest.raises(FormatError, match=message):
        cache.restore(changed(started(tokens).snapshot(), query_energy=energy(number)))
    assert (cache.snapshot().to_bytes() == held) is True


@pytest.mark.parametrize("shape", [(2, 2, 41, 32), (2, 2, 40, 16), (2, 1, 40, 32)])
def test_energies_of_another_shape_are_refused(shape):
    with pytest.raises(FormatError, match="query_energy"):
        changed(started(40).snapshot(), query_energy=torch.ones(shape))


def test_energies_that_nothing_learns_from_are_refused():
    for spec in (
        "turboquant:bits=4,center=64",
        "trellis:bits=3,center=64,first=false,weights=false,blocks=false",
    ):
        cache = started(40, spec)
        with pytest.raises(FormatError, match="nothing learns from"):
            cache.restore(changed(cache.snapshot(), query_energy=energy()))


def test_a_calibrated_cache_learns_no_more():
    k, v = random_tokens(1, 2, 100, 32), random_tokens(1, 2, 100, 16)
    cache = create_cache(SPEC, GEOMETRY, calibration={0: (k, v), 1: (k, v)})
    cache.restore(started(40).snapshot())
    attend(cache, 60, 7)
    fresh = create_cache(SPEC, GEOMETRY, calibration={0: (k, v), 1: (k, v)})
    attend(fresh, 100, 7)
    for layer in range(2):
        own, other = (one.snapshot().layer(layer).streams[0].learnt for one in (cache, fresh))
        assert own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own)


def test_pages_are_calibrated_and_take_no_cache_that_has_not_learnt():
    k, v = random_tokens(1, 2, 100, 32), random_tokens(1, 2, 100, 16)
    pages = PagedKVCache(SPEC, GEOMETRY, 9, calibration={0: (k, v), 1: (k, v)})
    with pytest.raises(MismatchError, match="calibration=snapshot"):
        pages.restore(started(40).snapshot())
    view = pages.view([pages.allocate(), pages.allocate()])
    attend(view, 40)
    assert pages.snapshot([0, 1]).manifest.version == VERSION


def test_rows_that_have_seen_unlike_numbers_of_queries_are_no_batch():
    one: LayerState = started(40).snapshot().layer(0)
    k, v = one.streams
    both = stack_rows([one, one]).streams[0].query_energy
    assert torch.equal(both, torch.cat([k.query_energy, k.query_energy]))
    for other in (None, k.query_energy[:, :, :39]):
        states = [one, replace(one, streams=(replace(k, query_energy=other), v))]
        with pytest.raises(GeometryError, match="unlike numbers of queries"):
            stack_rows(states)
