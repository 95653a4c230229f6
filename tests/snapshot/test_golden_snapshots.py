"""Snapshots of `tests/golden/snapshots/make.py` are read; a cache goes on to the same bytes.

Up to version 3 tokens were packed before they left the window: of those the same bytes come later.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from by_path import module_at

from kvpact import AttendConfig, Snapshot
from kvpact.errors import SpecError
from kvpact.key_offset import same_offset
from kvpact.snapshot import StreamState
from kvpact.snapshot.manifest import LATE, WITH_RECORDS
from kvpact.snapshot.tensors import same_tensors

FOLDER = Path(__file__).parents[1] / "golden" / "snapshots"
make = module_at(FOLDER / "make.py")


def load(name: str, when: str, version: int) -> Snapshot:
    path = FOLDER / f"{name}-{when}-v{version}.safetensors"
    assert path.is_file(), f"{path.name} is missing: see {FOLDER / 'make.py'}"
    return Snapshot.load(path)


def contents(snapshot: Snapshot) -> tuple:
    """Everything but the geometry, to which later versions may add fields."""
    container = snapshot._container
    manifest = {name: x for name, x in container.manifest.items() if name != "geometry"}
    sums = [container.section(i).numpy().tobytes() for i in range(container.num_sections)]
    return manifest, [hashlib.sha256(x).hexdigest() for x in sums]


def files(name: str) -> tuple[Snapshot, Snapshot]:
    """Return what was held before and after 40 more tokens, looked over."""
    versions = make.VERSIONS[name]
    before, after = load(name, "before", versions[0]), load(name, "after", versions[1])
    assert (before._container.version, after._container.version) == versions
    assert before.geometry == after.geometry == make.GEOMETRY
    assert before.tokens == make.HELD[name] == after.tokens - 40
    assert torch.equal(before.token_ids, torch.arange(before.tokens).expand(2, -1))
    assert before.manifest.identity.to_json() == {"adapter": None, "model": "m", "tenant": "t"}
    assert before.manifest.layers[0].padding == (3, 0)
    return before, after


def gone_on(name: str, before: Snapshot):
    cache = make.cache_for(name)
    cache.restore(before)
    make.grow(cache, 40, 7)
    return cache


@pytest.mark.parametrize("name", sorted(set(make.CASES) - set(make.EARLY)))
def test_read_and_gone_on_from(name: str):
    before, after = files(name)
    cache = gone_on(name, before)
    now = cache.snapshot(token_ids=after.token_ids, identity=after.manifest.identity)
    assert now.geometry == make.GEOMETRY
    assert contents(now) == contents(after)


def same_slots(one: StreamState, other: StreamState, tokens: int) -> bool:
    """Tell whether all tokens in front of `tokens` have the same slots in both."""
    return all(
        torch.equal(one.slots[f.name][:, :, : -(-tokens // f.tokens)],
                    other.slots[f.name][:, :, : -(-tokens // f.tokens)])
        for f in one.fields
    )  # fmt: skip


def same_rest(one: StreamState, other: StreamState) -> bool:
    """Tell whether sinks, what was learnt and key offsets are the same."""
    sinks = [{} if s.sinks is None else {"sinks": s.sinks} for s in (one, other)]
    learnt = same_tensors(*sinks) and same_tensors(one.learnt, other.learnt)
    return learnt and same_offset(one.offset, other.offset) and one.origin == other.origin


@pytest.mark.parametrize("name", make.EARLY)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_an_early_version_holds_is_held(name: str, when: str):
    """Restored, it is the same snapshot, but for its version and the energies of version 3."""
    held = dict(zip(("before", "after"), files(name), strict=True))[when]
    cache = make.cache_for(name)
    cache.restore(held)
    now = cache.snapshot(token_ids=held.token_ids, identity=held.manifest.identity)
    for index in range(2):
        states = now.layer(index).streams, held.layer(index).streams
        for one, other in zip(*states, strict=True):
            assert one.fields == other.fields and same_slots(one, other, other.packed)
            assert (one.packed, one.start) == (other.packed, other.start)
            assert torch.equal(one.tail, other.tail) and same_rest(one, other)
    waiting = any(s.packed < s.length for i in range(2) for s in held.layer(i).streams)
    assert now.manifest.version == (LATE if waiting else held._container.version)
    if not waiting:
        assert contents(now) == contents(held)


@pytest.mark.parametrize("name", [name for name in make.EARLY if name != "energies"])
def test_gone_on_from_an_early_version(name: str):
    """All tokens come to the bytes that they had then, once they have left the window."""
    before, after = files(name)
    cache = gone_on(name, before)
    now = cache.snapshot()
    make.grow(cache, 83, 9)  # as many as the pages have room for
    later = cache.snapshot()
    cache.truncate(after.tokens)
    cut = cache.snapshot()
    for index in range(2):
        layers = [x.layer(index) for x in (after, now, later, cut)]
        assert len({layer.padding for layer in layers}) == 1
        for old, new, long, short in zip(*(layer.streams for layer in layers), strict=True):
            common = max(old.start, new.start)
            assert torch.equal(old.tail[:, :, common - old.start :],
                               new.tail[:, :, common - new.start :])  # fmt: skip
            assert long.start >= short.packed == after.tokens
            whole = old.packed < after.tokens  # a group was open
            assert same_slots(short, old, old.packed)
            shapes = [{n: x.shape for n, x in state.slots.items()} for state in (short, old)]
            assert whole or shapes[0] == shapes[1]
            assert same_rest(new, old) and same_rest(short, old)


def test_energies_of_version_3_are_not_used():
    """They are of the first tokens: what is learnt is what is learnt without queries."""
    before, after = files("energies")
    fresh = make.cache_for("energies")
    config = AttendConfig(padding=torch.tensor([3, 0]))
    for layer in range(2):
        fresh.prefill(layer, *make.inputs(41, 1 + layer)[:2], None, config)
    fresh.truncate(40)
    make.grow(fresh, 40, 7)
    now = gone_on("energies", before).snapshot()
    assert contents(now) == contents(fresh.snapshot())
    for index in range(2):
        (k, v), (old_k, old_v) = (x.layer(index).streams for x in (now, after))
        assert k.learnt.keys() == old_k.learnt.keys() and v.packed == 64 <= old_v.packed
        assert torch.equal(k.learnt["first"], old_k.learnt["first"])
        assert same_slots(v, old_v, 64) and torch.equal(v.sinks, old_v.sinks)


def test_tokens_of_an_older_version_of_their_method_are_refused():
    """Version 1 of turboquant had other levels: its codes would be read as other numbers."""
    before = Snapshot.load(FOLDER / "refused" / "turboquant-of-version-1.safetensors")
    cache = make.cache_for("turboquant")
    make.grow(cache, 5, 3)
    held = contents(cache.snapshot())
    with pytest.raises(SpecError, match=r"'turboquant' version 1 is not known; this is 2: read it"):
        cache.restore(before)
    assert contents(cache.snapshot()) == held


def test_windows_and_states_are_in_their_file():
    held = Snapshot.load(FOLDER / f"records-v{WITH_RECORDS}.safetensors")
    assert held.manifest.version == WITH_RECORDS and held.tokens == 9
    for one, other in zip(held.records(), make.records(), strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.tensor.dtype == other.tensor.dtype
        assert replace(one, tensor=None) == replace(other, tensor=None)
    cache = make.cache_for("waiting")
    make.grow(cache, 9, 1, [3, 0])
    assert contents(cache.snapshot_with(make.records())) == contents(held)
    state = cache.snapshot().layer(1).streams[0]
    assert torch.equal(held.layer(1).streams[0].tail, state.tail)


@pytest.mark.parametrize("rows", [[0], [1, 1]])
@pytest.mark.parametrize("name", make.EARLY)
def test_rows_of_an_early_version(name: str, rows: list[int]):
    before, _ = files(name)
    batch, chosen = make.cache_for(name), make.cache_for(name)
    batch.restore(before)
    batch.select(torch.tensor(rows))
    chosen.restore(Snapshot.from_bytes(before.select(rows).to_bytes()))
    assert contents(chosen.snapshot()) == contents(batch.snapshot().select(range(len(rows))))
