"""Snapshots that were written once are read, and a cache goes on from them to the same bytes.

They come from `tests/golden/snapshots/make.py`, which no test runs: a missing file is a failure.
"""

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch

from kvpact import Snapshot
from kvpact.errors import SpecError
from kvpact.snapshot.manifest import VERSION, WITH_ENERGIES, WITH_OFFSETS

FOLDER = Path(__file__).parents[1] / "golden" / "snapshots"
_spec = importlib.util.spec_from_file_location("make_golden_snapshots", FOLDER / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


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


@pytest.mark.parametrize("name", make.CASES)
def test_read_and_gone_on_from(name: str):
    versions = make.VERSIONS[name]
    before, after = load(name, "before", versions[0]), load(name, "after", versions[1])
    assert (before.manifest.version, after.manifest.version) == versions
    assert before.tokens == make.HELD[name]
    assert after.tokens == before.tokens + 40
    assert torch.equal(before.token_ids, torch.arange(before.tokens).expand(2, -1))
    assert before.manifest.identity.to_json() == {"adapter": None, "model": "m", "tenant": "t"}
    assert before.manifest.layers[0].padding == (3, 0)
    cache = make.cache_for(name)
    cache.restore(before)
    make.grow(cache, 40, 7)
    ids, who = after.token_ids, after.manifest.identity
    now = cache.snapshot(token_ids=ids, identity=who)
    assert now.geometry == after.geometry == make.GEOMETRY
    assert contents(now) == contents(after)


def test_tokens_of_an_older_version_of_their_method_are_refused():
    """Version 1 of turboquant had other levels: its codes would be read as other numbers."""
    before = Snapshot.load(FOLDER / "refused" / "turboquant-of-version-1.safetensors")
    cache = make.cache_for("turboquant")
    make.grow(cache, 5, 3)
    held = contents(cache.snapshot())
    with pytest.raises(SpecError, match=r"'turboquant' version 1 is not known; this is 2: read it"):
        cache.restore(before)
    assert contents(cache.snapshot()) == held


def test_the_cut_group_and_what_was_learnt_are_in_them():
    cut = load("cut-group", "before", VERSION).layer(0).streams[0]
    assert (cut.packed, cut.start) == (50, 50)
    assert {"codebooks"} == set(load("learnt", "before", VERSION).layer(1).streams[0].learnt)


def test_the_offset_is_in_its_files():
    state = load("offset", "before", WITH_OFFSETS).layer(1).streams[0]
    assert state.offset.digest == make.OFFSET.digest
    assert state.origin == (3, 0)


def test_the_queries_seen_are_in_their_file():
    before = load("energies", "before", WITH_ENERGIES).layer(1).streams[0]
    assert before.query_energy.shape == (2, 2, 40, 16) and not before.learnt
    assert load("energies", "after", VERSION).layer(1).streams[0].learnt


def test_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 400_000
