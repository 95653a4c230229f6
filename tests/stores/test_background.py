"""Writes in the background: order, limits, errors, forks and the end of the interpreter."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from kvpact.errors import StoreError, StoreFull
from kvpact.stores import BackgroundStore, DirectoryStore, MemoryStore


class Gated(MemoryStore):
    """Writes when it is let; says when it began."""

    def __init__(self, fail=()):
        super().__init__()
        self.gate, self.begun, self.fail = threading.Event(), threading.Event(), set(fail)
        self.order = []

    def _write(self, name, head, blob, created):
        self.begun.set()
        assert self.gate.wait(60)
        if name in self.fail:
            raise StoreFull(f"no room for {name}")
        self.order.append(name)
        super()._write(name, head, blob, created)


def test_a_put_does_not_wait_and_flush_does():
    inner = Gated()
    with BackgroundStore(inner) as store:
        store.put("a", b"1")
        assert inner.begun.wait(60)
        store.put("b", b"2")
        store.put("c", b"3")
        store.put("b", b"22")
        assert inner.order == [] and store.stats().pending == 3
        assert [store.get(key) for key in "abc"] == [b"1", b"22", b"3"]
        assert sorted(store) == ["a", "b", "c"] and "b" in store
        assert store.delete("c") and store.get("c") is None
        inner.gate.set()
        store.flush()
        assert inner.order == ["a", "b"] and store.stats().pending == 0
        assert inner.get("b") == b"22"


def test_delete_waits_for_the_write_under_way():
    inner = Gated()
    with BackgroundStore(inner) as store:
        store.put("a", b"1")
        assert inner.begun.wait(60)
        deleted = []
        thread = threading.Thread(target=lambda: deleted.append(store.delete("a")))
        thread.start()
        inner.gate.set()
        thread.join(60)
        assert deleted == [True] and "a" not in store and "a" not in inner


@pytest.mark.parametrize("limits", [{"max_pending": 2}, {"max_pending_bytes": 20}], ids=str)
def test_a_full_queue_blocks_or_refuses(limits):
    inner = Gated()
    with BackgroundStore(inner, **limits, on_full="refuse") as store:
        store.put("a", bytes(10))
        assert inner.begun.wait(60)
        store.put("b", bytes(10))
        with pytest.raises(StoreFull, match="flush"):
            store.put("c", bytes(10))
        store.put("b", bytes(9))
        assert store.get("c") is None and store.stats().errors == 1
        inner.gate.set()
    inner = Gated()
    with BackgroundStore(inner, **limits) as store:
        store.put("a", bytes(10))
        store.put("b", bytes(10))
        assert inner.begun.wait(60)
        entered = threading.Event()

        def put():
            entered.set()
            store.put("c", bytes(10))

        thread = threading.Thread(target=put)
        thread.start()
        assert entered.wait(60) and "c" not in inner
        inner.gate.set()
        thread.join(60)
        store.flush()
        assert inner.order == ["a", "b", "c"]


def test_an_entry_larger_than_the_queue_waits_alone():
    with BackgroundStore(MemoryStore(), max_pending_bytes=10) as store:
        store.put("a", bytes(1000))
        store.flush()
        assert store.get("a") == bytes(1000)


@pytest.mark.parametrize("end", ["flush", "close"])
def test_errors_of_the_background_are_raised_once_and_counted(end):
    inner = Gated(fail="ac")
    inner.gate.set()
    store = BackgroundStore(inner)
    for key in "abc":
        store.put(key, b"1")
    with pytest.raises(StoreFull, match=r"2 writes failed.*no room for a") as raised:
        getattr(store, end)()
    assert isinstance(raised.value.__cause__, StoreFull)
    if end == "flush":
        assert store.stats().errors == 2 and list(store) == ["b"]
        store.flush()
        store.put("d", b"1")
        store.flush()
    store.close()


def test_failed_writes_keep_no_blobs():
    class Beside:  # bytes can't be referred to weakly; this lives in the same frame
        pass

    class Full(MemoryStore):
        def _write(self, name, head, blob, created):
            local = Beside()
            references.append(weakref.ref(local))
            try:
                raise OSError("disk")
            except OSError as error:
                raise StoreFull(f"no room for {name}") from error

    references = []
    store = BackgroundStore(Full())
    for index in range(5):
        store.put(f"k{index}", bytes(1000))
    store._drain()
    gc.collect()
    assert len(references) == 5 and [r() for r in references] == [None] * 5
    with pytest.raises(StoreFull, match=r"5 writes failed.*no room for k0") as raised:
        store.close()
    assert isinstance(raised.value.__cause__.__cause__, OSError)


def test_failures_are_told_where_closing_fails_too():
    class Broken(Gated):
        def _close(self):
            raise RuntimeError("can't close")

    inner = Broken(fail="a")
    inner.gate.set()
    store = BackgroundStore(inner)
    store.put("a", b"1")
    with pytest.raises(StoreFull, match=r"1 write failed.*no room for a; then closing failed: can"):
        store.close()
    with pytest.raises(RuntimeError, match="can't close"):
        BackgroundStore(Broken()).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_process_is_told(tmp_path):
    """Its copy has no thread; a put would wait in it for ever."""
    code = (
        "import os, sys\n"
        "from kvpact.errors import StoreError\n"
        "from kvpact.stores import BackgroundStore, DirectoryStore\n"
        "store = BackgroundStore(DirectoryStore(sys.argv[1]), max_pending=1)\n"
        "store.put('a', b'1')\n"
        "store._changed.acquire()  # as the thread may have it\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    for call in (lambda: store.put('b', b'2'), lambda: store.get('a'), store.flush,\n"
        "                 lambda: 'a' in store, lambda: store.delete('a'), store.stats,\n"
        "                 store.gc, lambda: list(store)):\n"
        "        try: call()\n"
        "        except StoreError as error: assert 'before the fork' in str(error)\n"
        "        else: os._exit(1)\n"
        "    store.close()\n"
        "    os._exit(7)\n"
        "store._changed.release()\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "store.put('c', b'3')\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "s"], check=True, timeout=120)
    with DirectoryStore(tmp_path / "s") as store:
        assert sorted(store) == ["a", "c"]


def test_what_waits_when_the_interpreter_ends_is_written(tmp_path):
    code = (
        "import sys; from kvpact.stores import open_store\n"
        "store = open_store(sys.argv[1], background=True)\n"
        "for i in range(30): store.put(f'k{i}', b'x' * 10_000)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "s"], check=True, timeout=120)
    with DirectoryStore(tmp_path / "s") as store:
        assert len(store) == 30


@pytest.mark.parametrize(
    "options", [{"max_pending": 0}, {"max_pending_bytes": -1}, {"on_full": "drop"}], ids=str
)
def test_bad_options_of_the_queue_are_refused(options):
    with pytest.raises(StoreError):
        BackgroundStore(MemoryStore(), **options)


def test_what_was_written_makes_room_for_as_much():
    inner = Gated()
    inner.gate.set()
    with BackgroundStore(inner, max_pending_bytes=20, on_full="refuse") as store:
        for key in "abc":
            store.put(key, bytes(15))
            store.flush()
        inner.gate.clear()
        try:
            store.put("d", bytes(10))
            store.put("e", bytes(10))
        finally:
            inner.gate.set()
    assert inner.order == [*"abcde"]
