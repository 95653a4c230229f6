"""`StoreContract` finds what is wrong with a store."""

from pathlib import Path

import pytest
from tests.stores import test_stores

from kvpact.stores import MemoryStore
from kvpact.stores.records import HEADER


class Unverified(MemoryStore):
    """Gives whatever is there."""

    def get(self, key):
        found = self._read(key)
        self._count("hits" if found else "misses")
        return found[0][HEADER + len(key) :] if found else None


class AnyKey(MemoryStore):
    """A key is whatever it is given."""

    def put(self, key, blob):
        super().put("any" if key == "../../etc/passwd" else key, blob)


class KeepsAll(MemoryStore):
    """Has no budget, whatever it was told."""

    def _make_room(self, size):
        return 0


class OldestFirst(MemoryStore):
    """Reads are no uses."""

    def _read(self, name, *, use=True):
        return super()._read(name, use=False)


class Forgets(MemoryStore):
    """A second put of a key is lost."""

    def _write(self, name, head, blob, created):
        if name not in self._records:
            super()._write(name, head, blob, created)


class NeverOld(MemoryStore):
    """Entries live for ever."""

    def _expired(self, created):
        return False


class KeepsDamaged(MemoryStore):
    """A damaged entry is a miss, and stays."""

    def _discard(self, name, token):
        pass


class Ghosts(MemoryStore):
    """A deleted key is listed."""

    def keys(self):
        return iter([*super().keys(), "ghost"])


def contract_of(kind):
    class Contract(test_stores.TestMemoryStore):
        def make_store(self, place, **options):
            return kind(**options)

    return Contract()


CHECKS = {
    Unverified: ["flipped_bits_are_found", "an_entry_in_anothers_place_is_a_miss"],
    KeepsAll: ["the_budget_holds", "the_least_recently_used_entry_makes_room"],
    OldestFirst: ["the_least_recently_used_entry_makes_room"],
    Forgets: ["random_histories_agree_with_a_dict"],
    NeverOld: ["an_old_entry_is_a_miss"],
    KeepsDamaged: ["gc_can_verify", "flipped_bits_are_found"],
    Ghosts: ["random_histories_agree_with_a_dict"],
}


@pytest.mark.parametrize(
    ("kind", "check"), [(kind, check) for kind, checks in CHECKS.items() for check in checks]
)
def test_a_broken_store_is_found(kind, check, tmp_path: Path):
    getattr(contract_of(MemoryStore), f"test_{check}")(tmp_path)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(contract_of(kind), f"test_{check}")(tmp_path)


def test_a_store_that_takes_any_key_is_found():
    with AnyKey() as store, pytest.raises(pytest.fail.Exception, match="was not refused"):
        contract_of(AnyKey).test_other_keys_are_refused(store)
