"""DirectoryStore: a full disk, a lost or hostile index, what lies in its folder."""

import os
import shutil
import sqlite3
import stat
import subprocess
import threading

import pytest

from kvpact.errors import FormatError, StoreError, StoreFull
from kvpact.stores import DirectoryStore, StoreWarning
from kvpact.testing.store_base import random_bytes

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX limits and modes")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    mount = shutil.which("mount")
    place = tmp_path / "disk"
    place.mkdir()
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def filled(store):
    """Put until the disk is full; return the entries that were taken."""
    held = {}
    for size in (100_000, 10_000, 1_000, 100):
        while True:
            key = f"k{len(held)}"
            try:
                store.put(key, random_bytes(size, len(held)))
            except StoreFull as error:
                assert "free the disk" in str(error)
                break
            held[key] = random_bytes(size, len(held))
    return held


def test_a_full_disk_refuses_writes_and_serves_reads(small_disk):
    with DirectoryStore(small_disk / "store") as store:
        held = filled(store)
        assert len(held) > 10
        with pytest.raises(StoreFull):
            store.put("k0", random_bytes(200_000, 99))
        assert {key: store.get(key) for key in held} == held
        assert sorted(store) == sorted(held)
        assert os.listdir(store.path / "tmp") == []
        with DirectoryStore(small_disk / "store") as second:
            assert {key: second.get(key) for key in held} == held
        assert store.stats().errors >= 5 and store.stats().damaged == 0


@pytest.mark.parametrize("by", ["entries", "others"])
def test_a_full_disk_is_reopened_and_emptied(small_disk, by):
    """Filled by others after the last close, there is no room to open the index, even."""
    with DirectoryStore(small_disk / "store") as store:
        held = {f"k{i}": random_bytes(100_000, i) for i in range(3)}
        for key, blob in held.items():
            store.put(key, blob)
        if by == "entries":
            held |= filled(store)
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(512))
    with DirectoryStore(small_disk / "store") as store:
        if by == "others":
            with pytest.raises(StoreFull):
                list(store)
        assert {key: store.get(key) for key in held} == held
        assert all(key in store for key in held)
        with pytest.raises(StoreFull):
            store.put("new", bytes(50_000))
        assert store.delete("k0") and store.get("k0") is None
        store.put("new", b"there is room again")
        assert store.get("new") == b"there is room again"


@posix
def test_a_limit_on_file_sizes_refuses_writes_and_serves_reads(tmp_path):
    import resource

    with DirectoryStore(tmp_path / "store") as store:
        store.put("a", random_bytes(1000))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            with pytest.raises(StoreFull):
                store.put("b", bytes(600_000))
            with pytest.raises(StoreFull):
                store.put("a", bytes(600_000))
            assert store.get("a") == random_bytes(1000) and store.get("b") is None
            store.put("c", bytes(400_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(store) == ["a", "c"] and os.listdir(store.path / "tmp") == []


@posix
def test_folders_and_files_are_private(tmp_path):
    old = os.umask(0)
    try:
        with DirectoryStore(tmp_path / "store") as store:
            store.put("a", b"1")
            for path in (store.path, *store.path.rglob("*")):
                wanted = 0o700 if path.is_dir() else 0o600
                assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    finally:
        os.umask(old)


def entries(store):
    return {key: store.get(key) for key in store}


@pytest.fixture
def filled_store(tmp_path):
    with DirectoryStore(tmp_path / "store") as store:
        for index in range(20):
            store.put(f"k{index}", random_bytes(500, index))
        store.put("k3", b"replaced")
        store.delete("k4")
        yield store


def test_a_lost_index_is_made_again(filled_store):
    before, sizes = entries(filled_store), filled_store.stats()
    filled_store.close()
    for path in filled_store.path.glob("index.*"):
        path.unlink()
    with DirectoryStore(filled_store.path) as store:
        assert entries(store) == before and len(before) == 19
        assert (store.stats().entries, store.stats().bytes) == (sizes.entries, sizes.bytes)
        assert store.gc().leftovers == 0


@pytest.mark.parametrize("damage", ["noise", "empty", "first page"])
def test_a_damaged_index_is_made_again(filled_store, damage):
    before = entries(filled_store)
    filled_store.close()
    path = filled_store.path / "index.sqlite3"
    data = path.read_bytes()
    first_page = data[:100] + bytes(len(data) - 100)
    damaged = {"noise": random_bytes(9000), "empty": b"", "first page": first_page}
    path.write_bytes(damaged[damage])
    with DirectoryStore(filled_store.path) as store:
        if damage == "empty":
            assert entries(store) == before
        else:
            with pytest.warns(StoreWarning, match="made again"):
                assert entries(store) == before
        store.put("new", b"1")
        assert len(store) == 20


def test_an_index_made_anew_by_one_is_seen_by_others(filled_store):
    with DirectoryStore(filled_store.path) as other:
        before = entries(other)
        filled_store.rebuild()
        filled_store.put("mine", b"1")
        other.put("theirs", b"2")
        both = before | {"mine": b"1", "theirs": b"2"}
        assert entries(filled_store) == both == entries(other)


def test_an_index_can_not_name_files_elsewhere(filled_store, tmp_path):
    """A row that names another path is a miss, and nothing of others is read or removed."""
    outside = tmp_path / "outside.kvr"
    (file,) = filled_store._files.of_key("k1")
    shutil.copy(filled_store._files.folder / file, outside)
    with sqlite3.connect(filled_store.path / "index.sqlite3") as connection:
        for key, path in (("k1", "../../outside.kvr"), ("k2", str(outside))):
            connection.execute("UPDATE entries SET file = ? WHERE key = ?", (path, key))
    connection.close()
    for key in ("k1", "k2"):
        assert key not in filled_store and filled_store.get(key) is None
        assert not filled_store.delete(key)
    filled_store.gc()
    assert outside.exists()


def test_a_row_without_its_file_is_a_miss_and_goes(filled_store):
    (file,) = filled_store._files.of_key("k1")
    (filled_store._files.folder / file).unlink()
    assert "k1" not in filled_store and filled_store.get("k1") is None
    assert "k1" not in list(filled_store)
    (file,) = filled_store._files.of_key("k2")
    (filled_store._files.folder / file).unlink()
    assert filled_store.gc().leftovers == 1
    assert len(filled_store) == 17


def test_gc_leaves_alone_what_no_writer_made(filled_store, tmp_path):
    aside = filled_store.path / "tmp"
    outside = tmp_path / "outside"
    outside.write_bytes(b"somebody's")
    (aside / "folder").mkdir()
    (aside / "link").symlink_to(outside)
    (aside / "nowhere").symlink_to(tmp_path / "nothing")
    os.mkfifo(aside / "pipe")
    (aside / "left").write_bytes(b"torn")
    report = filled_store.gc()
    assert (report.leftovers, report.freed) == (1, 4)
    assert sorted(os.listdir(aside)) == ["folder", "link", "nowhere", "pipe"]
    assert outside.read_bytes() == b"somebody's"


def test_a_store_that_another_process_is_making_is_no_other_folder(tmp_path):
    """The marker is looked for first, and the other process may be further by then."""
    for name in ("index.sqlite3", "index.sqlite3-journal", "index.lock"):
        (tmp_path / name).touch()
    with DirectoryStore(tmp_path) as store:
        store.put("a" * 64, b"x")
        assert store.get("a" * 64) is not None


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        DirectoryStore(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(StoreError):
        DirectoryStore(tmp_path / "thesis.tex")


@pytest.mark.parametrize("marker", ['{"format": "kvpact.store", "version": 2}', "", "[]"])
def test_a_store_of_another_version_is_refused(tmp_path, marker):
    DirectoryStore(tmp_path / "s").close()
    (tmp_path / "s" / "kvpact-store.json").write_text(marker)
    with pytest.raises(FormatError, match="another directory"):
        DirectoryStore(tmp_path / "s")


def test_a_reader_meets_a_replacement(filled_store, monkeypatch):
    """Between looking a file up and reading it, the entry is replaced: the new one is read."""
    with DirectoryStore(filled_store.path) as other:
        real, done = filled_store._files.read, []

        def read(file):
            if not done:
                done.append(file)
                other.put("k1", b"newer")
            return real(file)

        monkeypatch.setattr(filled_store._files, "read", read)
        assert filled_store.get("k1") == b"newer" and filled_store.stats().damaged == 0


def test_a_damaged_entry_that_was_replaced_stays(filled_store, monkeypatch):
    """What is removed is what was read, not what another process put there since."""
    with DirectoryStore(filled_store.path) as other:
        real = filled_store._files.read

        def read(file):
            record = real(file)
            other.put("k1", b"good")
            return record[:-1]

        monkeypatch.setattr(filled_store._files, "read", read)
        with pytest.warns(StoreWarning):
            assert filled_store.get("k1") is None
        assert other.get("k1") == b"good"


def test_a_held_index_is_a_named_error(filled_store):
    with DirectoryStore(filled_store.path, patience=0.01) as other:
        with sqlite3.connect(filled_store.path / "index.sqlite3") as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="holds the index too long"):
                other.put("new", b"1")
            assert other.get("k1") == random_bytes(500, 1)
            connection.rollback()
        connection.close()
        assert "new" not in other


@posix
def test_a_store_works_on_in_a_forked_process(filled_store):
    """SQLite's connections may not cross a fork; nobody has to know."""
    before = entries(filled_store)
    assert threading.active_count() >= 1
    pid = os.fork()
    if pid == 0:
        try:
            good = entries(filled_store) == before
            filled_store.put("child", b"1")
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert entries(filled_store) == before | {"child": b"1"}


def test_entries_that_take_all_that_is_allowed_stay(tmp_path):
    with DirectoryStore(tmp_path / "free") as store:
        for key in "ab":
            store.put(key, random_bytes(1000))
        held = store.stats().bytes
    with DirectoryStore(tmp_path / "limited", max_bytes=held) as store:
        for key in "ab":
            store.put(key, random_bytes(1000))
        assert sorted(store) == ["a", "b"]
