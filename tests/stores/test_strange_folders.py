"""A `DirectoryStore` among pipes, links and folders that others may write to."""

import os
import warnings

import pytest

from kvpact.errors import FormatError, StoreError
from kvpact.stores import DirectoryStore, MemoryStore, StoreWarning

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pipe_for_entry(tmp_path):
    """Return a store one of whose entries was replaced by a named pipe."""
    path = tmp_path / "store"
    with DirectoryStore(path) as store:
        store.put("a", b"one")
        (file,) = path.glob("blobs/*/*")
        store.put("b", b"two")
    file.unlink()
    os.mkfifo(file)
    return path


def test_a_pipe_in_the_place_of_an_entry_is_a_damaged_entry(pipe_for_entry):
    with DirectoryStore(pipe_for_entry) as store:
        with pytest.warns(StoreWarning, match="a was changed"):
            assert store.get("a") is None
        assert store.stats().damaged == 1
        assert sorted(store.keys()) == ["b"] and store.get("b") == b"two"


def test_gc_and_a_new_index_do_not_wait_for_a_pipe(pipe_for_entry):
    with DirectoryStore(pipe_for_entry) as store:
        report = store.gc(verify=True)
        assert (report.damaged, sorted(store.keys())) == (1, ["b"])
    file = next(iter(pipe_for_entry.glob("blobs/*/*")))
    os.mkfifo(file.with_name(f"{file.name[:32]}-{'0' * 16}.kvr"))
    (pipe_for_entry / "index.sqlite3").unlink()
    with DirectoryStore(pipe_for_entry) as store:
        assert store.get("b") == b"two"


def test_a_link_in_the_place_of_an_entry_is_not_followed(tmp_path):
    with DirectoryStore(tmp_path / "store") as store:
        store.put("a", b"one")
        (file,) = (tmp_path / "store").glob("blobs/*/*")
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.warns(StoreWarning, match="a was changed"):
            assert store.get("a") is None
    assert (tmp_path / "elsewhere").exists()


def test_a_pipe_in_the_place_of_the_marker_is_refused(tmp_path):
    DirectoryStore(tmp_path / "store").close()
    marker = tmp_path / "store" / "kvpact-store.json"
    marker.unlink()
    os.mkfifo(marker)
    with pytest.raises(FormatError, match=r"kvpact-store\.json"):
        DirectoryStore(tmp_path / "store")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_may_write_to_is_warned_of(tmp_path, mode):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(StoreWarning, match=r"store.*every user.*chmod 700"):
        store = DirectoryStore(folder)
    store.put("a", b"one")
    assert store.get("a") == b"one"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775])
def test_other_folders_are_taken_without_a_word(tmp_path, mode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with warnings.catch_warnings(action="error"):
        store = DirectoryStore(tmp_path / "store")
        store.put("a", b"one")
        assert store.get("a") == b"one"
        store.close()
    assert (tmp_path / "store").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "1000"])
def test_a_budget_that_holds_nothing_is_refused(tmp_path, budget):
    with pytest.raises(StoreError, match="max_bytes"):
        MemoryStore(max_bytes=budget)
    with pytest.raises(StoreError, match="max_bytes"):
        DirectoryStore(tmp_path / "store", max_bytes=budget)
    assert not (tmp_path / "store").exists()
