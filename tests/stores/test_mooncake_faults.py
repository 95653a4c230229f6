"""A Mooncake cluster whose master, peers or own process end or stand still: never a hang."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from mooncake_cluster import frozen
from store_outages import every_call_fails_gently, killed_in_the_middle_of_puts

from kvpact.errors import StoreError, StoreUnavailable
from kvpact.stores import BackgroundStore, MooncakeStore, StoreWarning

pytestmark = pytest.mark.timeout(120)  # none of these may hang


def connect(master, **options):
    return MooncakeStore(master.url, **{"timeout": 20.0, "retry_after": 0.0} | options)


def hasty(master, **options):
    """A store that waits for a second, beside one that gives memory."""
    return connect(master, timeout=1.0, **options)


def until(call):
    """Call until it succeeds; the cluster's own time limits are seconds."""
    end = time.monotonic() + 60
    while True:
        try:
            return call()
        except StoreError:  # a peer that comes back gives no memory for a second
            assert time.monotonic() < end


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_master_killed_and_started_again(master):
    """It forgets its entries, as Mooncake's do; the same objects serve again."""
    with connect(master, segment_size=16 << 20), hasty(master) as store:
        store.put("a", b"1")
        assert store.get("a") == b"1"
        master.kill()
        every_call_fails_gently(store, "MooncakeStore")
        assert master.start()
        until(lambda: store.put("b", b"2"))
        assert store.get("b") == b"2" and store.get("a") is None


def test_a_master_killed_in_the_middle_of_puts(master):
    with connect(master, segment_size=64 << 20) as peer:
        store = BackgroundStore(hasty(master, retry_after=0.5), max_pending=4)
        blobs = killed_in_the_middle_of_puts(store, master)
        until(lambda: peer.put("new", b"1"))
        found = {key: peer.get(key) for key in blobs}
        assert all(blob in (None, blobs[key]) for key, blob in found.items())
        assert peer.stats().damaged == 0
        store.close()


def test_a_master_that_stands_still(master):
    with connect(master, segment_size=16 << 20), hasty(master) as store:
        store.put("a", b"1")
        with master.frozen():
            every_call_fails_gently(store, "MooncakeStore")
            with pytest.warns(StoreWarning, match="taken as a miss"):
                hasty(master).close()
        assert until(lambda: store.put("b", b"2")) is None
        assert store.get("b") == b"2"


def test_a_store_that_gives_memory_is_closed_while_the_master_stands_still(master):
    store = hasty(master, segment_size=16 << 20)
    store.put("a", b"1")
    pid = store._client._process.pid
    with master.frozen():
        store.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("stops", [False, True], ids=["killed", "frozen"])
def test_a_peer_that_is_gone_takes_its_entries_along(master, stops):
    peer = connect(master, segment_size=32 << 20)
    with hasty(master) as store:
        for key in "abc":
            store.put(key, b"1" * 1_000_000)
        assert store.get("a") == b"1" * 1_000_000
        if not stops:
            peer._client.kill()
        with frozen(peer._client._process.pid) if stops else nullcontext():
            with pytest.warns(StoreWarning, match="taken as a miss"):
                assert store.get("b") is None
            with pytest.raises(StoreUnavailable):
                store.put("d", b"2" * 1_000_000)
            with connect(master, segment_size=32 << 20):
                until(lambda: store.put("d", b"2" * 1_000_000))
                assert store.get("d") == b"2" * 1_000_000
        peer.close()


def test_after_a_failure_nobody_asks_for_a_while(master):
    with connect(master, segment_size=16 << 20), hasty(master, retry_after=3600) as store:
        store.put("a", b"1")
        with master.frozen(), pytest.warns(StoreWarning):
            assert store.get("a") is None
        with pytest.warns(StoreWarning, match="taken as a miss") as caught:
            assert [store.get("a") for _ in range(100)] == [None] * 100
        assert len(caught) == 100


def test_a_process_that_is_killed_takes_its_client_along(master):
    """The memory that it gave is gone from the cluster; no client is left behind."""
    code = (
        "import sys\n"
        "from kvpact.stores import open_store\n"
        "store = open_store(sys.argv[1], segment_size='16MiB', timeout=20.0)\n"
        "print(store._client._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command, pipe = [sys.executable, "-c", code, master.url], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        client = int(process.stdout.readline())
        process.kill()
    end = time.monotonic() + 60
    while runs(client):
        assert time.monotonic() < end


def test_what_mooncake_prints_is_kept_where_it_is_asked_for(master, tmp_path):
    with connect(master, log=str(tmp_path / "log")) as store:
        assert store.get("a") is None
    assert b"client_service" in (tmp_path / "log").read_bytes()


def test_its_own_process_ends_and_is_started_again(master):
    with connect(master, segment_size=16 << 20), connect(master) as store:
        store.put("a", b"1")
        os.kill(store._client._process.pid, signal.SIGKILL)
        assert until(lambda: store.delete("nothing")) is False
        assert store.get("a") == b"1"


def test_its_own_process_stands_still(master):
    """Calls that nobody waits for any more keep their memory until they are answered."""
    with connect(master, segment_size=16 << 20), hasty(master) as store:
        blobs = {key: key.encode() * 100_000 for key in "abcdefgh"}
        for key, blob in blobs.items():
            store.put(key, blob)
        with frozen(store._client._process.pid):
            for _ in range(3):
                with pytest.warns(StoreWarning, match="taken as a miss"):
                    assert store.get("a") is None
            with pytest.raises(StoreUnavailable):
                store.put("a", b"2" * 100_000)
            with pytest.warns(StoreWarning, match="4 calls wait already"):
                assert store.get("b") is None
        assert until(lambda: store.delete("nothing")) is False
        assert store.get("a") in (None, b"2" * 100_000, blobs["a"])  # the put is under way
        del blobs["a"]
        assert {key: store.get(key) for key in blobs} == blobs


def test_a_master_that_is_not_there(start_master):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.warns(StoreWarning, match="the master does not answer"):
        store = MooncakeStore(f"mooncake://127.0.0.1:{port}", timeout=1.0, retry_after=0.0)
    with store:
        every_call_fails_gently(store, "MooncakeStore")


def test_a_master_that_says_nothing(start_master):
    """It accepts and is silent; Mooncake's own setup would wait and try again for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mooncake://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.warns(StoreWarning, match="the master does not answer"):
            store = MooncakeStore(url, timeout=1.0, retry_after=3600)
        with store, pytest.warns(StoreWarning):
            assert store.get("a") is None
