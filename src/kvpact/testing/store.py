"""`StoreContract`: what a store has to keep to."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from kvpact.testing.store_checks import DamageChecks, EntryChecks, LimitChecks


class StoreContract(EntryChecks, DamageChecks, LimitChecks):
    """Inherit this in a test module, override `make_store` and `tamper`; pytest does the rest.

    Attributes
    ----------
    persistent, budget, expires, tampers : bool
        What the store can do; the checks of what it can't are skipped.
    examples, steps : int
        How many random histories are run beside a dict, and how long they are.

    Notes
    -----
    A conforming store gives back what was put or nothing, never a wrong byte; lists what it holds;
    refuses keys that are no digests; counts; and after a named error holds what it held.
    """

    examples: ClassVar[int] = 25
    steps: ClassVar[int] = 20

    def test_random_histories_agree_with_a_dict(self, tmp_path: Path) -> None:
        """Every history of puts, gets, deletes, collections and restarts."""
        pytest.importorskip("hypothesis")
        from kvpact.testing.store_machine import run_against_a_dict

        # Not at `tmp_path`: every history begins at a place of its own.
        run_against_a_dict(self.make_store, self.persistent, self.examples, self.steps)
