"""A store compared with a dict, through random histories. Needs hypothesis."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvpact.stores.base import Store

_KEYS = st.sampled_from(["a", "b", "c", "d-1", "e_2"])
_BLOBS = st.binary(max_size=300)


def run_against_a_dict(
    make: Callable[[Path], Store], reopens: bool, examples: int, steps: int
) -> None:
    """Run random histories of a store and of a dict, which have to agree after each step."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.folder = tempfile.TemporaryDirectory(prefix="store")
            self.store = make(Path(self.folder.name))
            for key in list(self.store):  # a server's place may have been used before
                self.store.delete(key)
            self.held: dict[str, bytes] = {}

        def teardown(self) -> None:
            self.store.close()
            self.folder.cleanup()

        @rule(key=_KEYS, blob=_BLOBS)
        def put(self, key: str, blob: bytes) -> None:
            self.store.put(key, blob)
            self.held[key] = blob

        @rule(key=_KEYS)
        def get(self, key: str) -> None:
            assert self.store.get(key) == self.held.get(key)

        @rule(key=_KEYS)
        def delete(self, key: str) -> None:
            assert self.store.delete(key) == (self.held.pop(key, None) is not None)

        @rule(verify=st.booleans())
        def gc(self, verify: bool) -> None:
            report = self.store.gc(verify=verify)
            assert report.expired == report.evicted == report.damaged == 0

        @rule()
        def flush(self) -> None:
            self.store.flush()

        @rule()
        def reopen(self) -> None:
            if reopens:
                self.store.close()
                self.store = make(Path(self.folder.name))

        @invariant()
        def same_keys(self) -> None:
            assert sorted(self.store) == sorted(self.held)
            assert [key in self.store for key in "abc"] == [key in self.held for key in "abc"]

    options: Any = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=options)
