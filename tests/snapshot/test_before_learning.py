"""A cache that is saved before its codecs have learnt goes on as if it had never stopped."""

from dataclasses import replace

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, Snapshot, create_cache
from kvpact.errors import FormatError, GeometryError, MismatchError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.snapshot import LayerState
from kvpact.snapshot.manifest import LATE, VERSION
from kvpact.snapshot.parts import stack_rows
from kvpact.testing import held_bytes, random_tokens

GEOMETRY = CacheGeometry(2, 2, 32, 16, dtype=torch.float32)
SPEC = "trellis:bits=3,sinks=2,window=5"
HELD, SEEN = 55, 18
"""It learns with the token 69, when 64 have left the window, from the last 32 queries: from 37."""
SHAPE = (torch.arange(32.0) % 7 + 1).view(1, 1, 1, -1)
"""Of the queries' channels, so that it matters which queries were seen."""


def attend(cache, count: int, seed: int = 0, padding: list[int] | None = None) -> None:
    config = AttendConfig(padding=None if padding is None else torch.tensor(padding))
    for layer in range(2):
        k = random_tokens(2, 2, count, 32, seed=seed + layer, offset=1.0)
        v = random_tokens(2, 2, count, 16, seed=seed + 10 + layer)
        q = random_tokens(2, 4, count, 32, seed=seed + 20 + layer) * SHAPE ** (1 - 2 * layer)
        cache.attend(layer, k=k, v=v, q=q, config=config)


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
    attend(cache, 130, 300)
    snapshot = cache.snapshot()
    assert snapshot.layer(1).streams[0].learnt
    return snapshot.to_bytes()


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [(f"trellis:{o},window=5", n)
     for o in ("bits=3,sinks=2", "bits=4,center=0", "bits=2,first=false") for n in (1, 40, 63, 68)]
    + [("trellis:bits=4,center=0", 100), ("turboquant:bits=4,first=true", 100)],
)  # fmt: skip
def test_goes_on_to_the_same_bytes(spec, tokens):
    cache = started(tokens, spec)
    assert not cache.snapshot().layer(1).streams[0].learnt
    restored = again(cache.snapshot(), spec)
    assert restored.memory_usage() == held_bytes(restored) == restored.stats()["bytes"]["total"]
    assert (goes_on(restored) == goes_on(cache)) is True


def leave_queries_out(cache) -> None:
    for layer in range(2):
        k, v = random_tokens(2, 2, 9, 32, seed=layer), random_tokens(2, 2, 9, 16, seed=layer + 5)
        cache.prefill(layer, k, v)


CHANGES = {
    "nothing": lambda cache: None,
    "roll back": lambda cache: cache.truncate(45),
    "roll back all": lambda cache: cache.truncate(0),
    "swap rows": lambda cache: cache.select(torch.tensor([1, 0])),
    "leave queries out": leave_queries_out,
}


@pytest.mark.parametrize("after", ["nothing", "roll back", "swap rows", "leave queries out"])
@pytest.mark.parametrize("before", ["roll back", "roll back all", "swap rows", "leave queries out"])
def test_whatever_came_before_and_after(before: str, after: str):
    cache = started(HELD)
    CHANGES[before](cache)
    fork, restored = cache.fork(), again(cache.snapshot())
    for one in (cache, fork, restored):
        CHANGES[after](one)
    wanted = goes_on(cache)
    assert (goes_on(restored) == wanted) is True
    assert (goes_on(again(fork.snapshot())) == wanted) is True


def test_rows_take_their_own_queries_along():
    cache = started(HELD)
    row = again(cache.snapshot().select([0]).select([0, 0]))
    cache.select(torch.tensor([0, 0]))
    assert (goes_on(row) == goes_on(cache)) is True


def test_a_prefix_of_no_tokens_has_no_queries():
    prefix = started(HELD).snapshot().slice(0, 0)
    assert prefix.layer(0).streams[0].query_energy is None
    assert (goes_on(again(prefix)) == goes_on(again(prefix))) is True


def changed(snapshot: Snapshot, **values) -> Snapshot:
    """Return a snapshot with other state of keys, and checksums of its own."""
    layers = [snapshot.layer(index) for index in range(snapshot.num_layers)]
    keys = [replace(layer.streams[0], **values) for layer in layers]
    both = zip(layers, keys, strict=True)
    layers = [replace(layer, streams=(k, layer.streams[1])) for layer, k in both]
    m = snapshot.manifest
    shape = {"geometry": m.geometry, "layout": m.layout, "page_size": m.page_size}
    return Snapshot.build(layers, slots=FORMAT_VERSION, **shape)


def test_the_queries_matter():
    """Without them other weights are learnt: what the tests above rest on."""
    held = started(HELD).snapshot()
    assert (goes_on(again(changed(held, query_energy=None))) == goes_on(again(held))) is False


def test_only_queries_that_are_to_be_learnt_from_are_in_a_snapshot():
    cache = started(HELD)
    held = cache.snapshot()
    assert held.manifest.version == LATE
    assert held.manifest.layers[0].streams[0].query_energy == SEEN
    energies = held.layer(1).streams[0].query_energy
    assert (energies.shape, energies.dtype) == ((2, 2, SEEN, 32), torch.uint8)
    assert held.sizes()["query energies"] == 2 * 2 * 2 * SEEN * 32
    assert sum(held.sizes().values()) == held.nbytes
    cache.truncate(HELD - SEEN)
    assert cache.snapshot().manifest.layers[0].streams[0].query_energy is None
    cache.truncate(0)
    assert cache.snapshot().manifest.version == VERSION
    attend(cache, 68)
    assert cache.snapshot().manifest.layers[0].streams[0].query_energy == 31
    attend(cache, 1)
    assert "query energies" not in cache.snapshot().sizes()
    cache.truncate(64)
    assert cache.snapshot().manifest.version == VERSION


def energy(number: float = 1.0, tokens: int = SEEN) -> torch.Tensor:
    return torch.full((2, 2, tokens, 32), number).to(torch.float8_e5m2).view(torch.uint8)


@pytest.mark.parametrize(("tokens", "seen", "number", "message"), [
    (HELD, SEEN, torch.nan, "energies of queries"),
    (HELD, SEEN, torch.inf, "energies of queries"),
    (HELD, SEEN, -1.0, "energies of queries"),
    (HELD, SEEN + 1, 1.0, "nothing learns from"),
    (37, 1, 1.0, "nothing learns from"),
    (20, 1, 1.0, "nothing learns from"),
    (68, 32, 1.0, "nothing learns from"),
    (69, 1, 1.0, "along with what was learnt"),
    (70, SEEN, 1.0, "along with what was learnt"),
])  # fmt: skip
def test_energies_that_no_cache_has_seen_are_refused(tokens, seen, number, message):
    cache = started(20)
    held = cache.snapshot().to_bytes()
    with pytest.raises(FormatError, match=message):
        cache.restore(changed(started(tokens).snapshot(), query_energy=energy(number, seen)))
    assert (cache.snapshot().to_bytes() == held) is True
    # Those that some cache could have seen are taken.
    cache.restore(changed(started(68).snapshot(), query_energy=energy(1.0, 31)))
    assert torch.equal(cache.snapshot().layer(0).streams[0].query_energy, energy(1.0, 31))


def test_tokens_that_nothing_was_learnt_from_are_refused():
    """As many as the codec wants have left the window: a cache would have learnt."""
    tail = {"packed": 0, "start": 0, "learnt": {}, "slots": {}}
    k = torch.zeros(2, 2, 69, 32)
    with pytest.raises(FormatError, match="nothing was learnt from"):
        create_cache(SPEC, GEOMETRY).restore(changed(started(69).snapshot(), tail=k, **tail))


@pytest.mark.parametrize(
    "shape", [(2, 2, HELD + 1, 32), (2, 2, SEEN, 16), (2, 1, SEEN, 32), (1, 2, SEEN, 32)]
)
def test_energies_of_another_shape_are_refused(shape):
    with pytest.raises(FormatError, match="query_energy"):
        energies = torch.ones(shape, dtype=torch.uint8)
        changed(started(HELD).snapshot(), query_energy=energies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e5m2])
def test_energies_of_another_dtype_are_refused(dtype):
    with pytest.raises(FormatError, match=r"query_energy.* dtype"):
        changed(started(HELD).snapshot(), query_energy=torch.ones(2, 2, SEEN, 32).to(dtype))


def test_energies_that_nothing_learns_from_are_refused():
    plain = "trellis:bits=3,center=64,window=5,first=false,weights=false,blocks=false"
    for spec in ("turboquant:bits=4,center=64,window=5", plain):
        cache = started(HELD, spec)
        with pytest.raises(FormatError, match="nothing learns from"):
            cache.restore(changed(cache.snapshot(), query_energy=energy()))


def seen() -> dict:
    """Return K and V that codecs learn from beforehand."""
    pair = random_tokens(1, 2, 100, 32), random_tokens(1, 2, 100, 16)
    return {0: pair, 1: pair}


def test_a_calibrated_cache_learns_no_more():
    cache, fresh = (create_cache(SPEC, GEOMETRY, calibration=seen()) for _ in range(2))
    cache.restore(started(HELD).snapshot())
    attend(cache, 60, 7)
    attend(fresh, 100, 7)
    for layer in range(2):
        own, other = (one.snapshot().layer(layer).streams[0].learnt for one in (cache, fresh))
        assert own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own)


def test_pages_are_calibrated_and_take_no_cache_that_has_not_learnt():
    pages = PagedKVCache(SPEC, GEOMETRY, 9, calibration=seen())
    with pytest.raises(MismatchError, match="calibration=snapshot"):
        pages.restore(started(HELD).snapshot())
    view = pages.view([pages.allocate(), pages.allocate()])
    attend(view, HELD)
    assert "query energies" not in pages.snapshot([0, 1]).sizes()


def test_rows_that_have_seen_unlike_numbers_of_queries_are_no_batch():
    one: LayerState = started(HELD).snapshot().layer(0)
    k, v = one.streams
    both = stack_rows([one, one]).streams[0].query_energy
    assert torch.equal(both, torch.cat([k.query_energy, k.query_energy]))
    for other in (None, k.query_energy[:, :, : SEEN - 1]):
        states = [one, replace(one, streams=(replace(k, query_energy=other), v))]
        with pytest.raises(GeometryError, match="unlike numbers of queries"):
            stack_rows(states)


def test_a_calibrated_cache_takes_tokens_whose_method_had_not_learnt_its_fields():
    """The rank is learnt, and with it what is stored."""
    spec = "lowrank:energy=0.9,window=40/int:bits=8,window=0"
    held = started(HELD, spec).snapshot()
    cache, fresh = (create_cache(spec, GEOMETRY, calibration=seen()) for _ in range(2))
    cache.restore(Snapshot.from_bytes(held.to_bytes()))
    attend(fresh, HELD, padding=[3, 0])
    for one in (cache, fresh):
        attend(one, 60, 7)
    assert cache.snapshot().layer(1).streams[0].packed
    assert (cache.snapshot().to_bytes() == fresh.snapshot().to_bytes()) is True
