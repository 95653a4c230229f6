"""Writers that are killed, and many writers at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.errors import StoreError
from kvpact.stores import DirectoryStore
from kvpact.stores import directory_files as files_module

LAB = Path(__file__).parent / "crash_lab.py"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed by signals")


def lab(*args):
    command = [sys.executable, LAB, *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=400, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_leave_a_store_in_which_all_is_well(tmp_path, count):
    result = lab("kills", tmp_path / "store", count, 7)
    assert result["kills"] == count and result["read"] > 2 * count
    bad = ("wrong", "damaged", "ghosts", "stray", "over")
    assert {name: result[name] for name in bad} == dict.fromkeys(bad, 0)
    assert result["leftovers"] > 0, "no kill hit a write: the test shows nothing"
    assert result["rebuilt"] == count // 20


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_8_processes_share_a_store(tmp_path, seconds):
    results = lab("crowd", tmp_path / "store", 8, seconds)
    assert len(results) == 8 and all(result["puts"] > 0 for result in results)
    assert sum(result["hits"] for result in results) > 0
    assert [(result["wrong"], result["damaged"]) for result in results] == [(0, 0)] * 8
    with DirectoryStore(tmp_path / "store") as store:
        assert store.stats().bytes <= 500_000 and store.gc(verify=True).damaged == 0
        assert all(store.get(key) is not None for key in store)


def test_a_kill_at_every_step_of_a_put(tmp_path):
    """Before the commit the old entry is there, afterwards the new one; never both, never none."""
    seen = lab("steps", tmp_path)
    assert len(seen) >= 7
    assert all([keys, *rest] == [["a"], ["blobs"], []] for keys, _, *rest in seen)
    blobs = [blob for _, blob, _, _ in seen]
    assert blobs == sorted(blobs) and (blobs[0], blobs[-1]) == ("first", "second")


def test_gc_leaves_the_files_of_live_writers(tmp_path):
    """A writer in the middle of its put is not swept away by another process's gc."""
    with DirectoryStore(tmp_path / "s") as store, DirectoryStore(tmp_path / "s") as other:
        with store._files.written(b"head", memoryview(b"blob")) as written:
            report = other.gc()
            assert written.exists() and report.leftovers == 0
        dead = store._files.aside / "0123"
        dead.write_bytes(b"torn")
        report = other.gc()
        assert (report.leftovers, report.freed) == (1, 4) and not dead.exists()


def test_gc_waits_for_a_put_between_its_rename_and_its_commit(tmp_path, monkeypatch):
    folder = tmp_path / "s"
    with DirectoryStore(folder) as store, DirectoryStore(folder, patience=0.01) as other:
        real = store._files.publish

        def publish(written, name):
            file = real(written, name)
            with pytest.raises(StoreError, match="holds the index too long"):
                other.gc()
            return file

        monkeypatch.setattr(store._files, "publish", publish)
        store.put("a", b"blob")
        assert other.gc().leftovers == 0 and other.get("a") == b"blob"


def test_gc_leaves_what_was_put_while_it_listed_the_files(tmp_path, monkeypatch):
    with DirectoryStore(tmp_path / "s") as store, DirectoryStore(tmp_path / "s") as other:
        store.put("a", b"old")
        real = other._files.names

        def names():
            found = real()
            store.put("a", b"new")
            store.put("b", b"blob")
            return found

        monkeypatch.setattr(other._files, "names", names)
        assert other.gc().leftovers == 0
        assert [store.get(key) for key in "ab"] == [b"new", b"blob"]


def test_sweep_between_a_file_and_its_lock(tmp_path, monkeypatch):
    """The one moment in which a live writer's file is not locked: it takes another one."""
    with DirectoryStore(tmp_path / "s") as store:
        real, first = files_module.lock, []

        def slow_lock(handle, *, wait):
            if not first:
                first.append(handle)
                (path,) = store._files.aside.iterdir()
                path.unlink()
            return real(handle, wait=wait)

        monkeypatch.setattr(files_module, "lock", slow_lock)
        store.put("a", b"blob")
        assert first and store.get("a") == b"blob"
