"""MooncakeStore on a real master with real clients: the conformance class, two processes."""

import hashlib
import json
import subprocess
import sys

import pytest
from commands import good

from kvpact.errors import StoreFull, StoreUnavailable
from kvpact.stores import MooncakeStore, StoreWarning, open_store
from kvpact.testing import StoreContract


@pytest.fixture(scope="module")
def cluster(start_master):
    """A master, and one process that gives memory to all stores."""
    master = start_master()
    with connect(master, segment_size="128MiB"):
        yield master
    master.kill()


def connect(master, **options):
    return MooncakeStore(master.url, **{"timeout": 20.0, "retry_after": 0.0} | options)


class TestMooncakeStore(StoreContract):
    examples, steps = 6, 12
    expires = True

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster):
        type(self).cluster = cluster

    def make_store(self, place, **options):
        prefix = f"kvpact:{hashlib.sha256(str(place).encode()).hexdigest()[:20]}:"
        return connect(self.cluster, prefix=prefix, **options)

    def tamper(self, store, key, edit):
        # Mooncake holds nothing without bytes; one that is no record stands for it.
        changed = edit(store._call("get", key)) or b"\0"
        assert store._call("put", key, b"", memoryview(changed)) == 0


def raw(master, code, **names):
    """Run Python in a process of its own, with a client `s` of Mooncake's own."""
    setup = {
        "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE",
        "local_buffer_size": 16 << 20, "global_segment_size": 0, "protocol": "tcp",
        "rdma_devices": "", "master_server_addr": f"127.0.0.1:{master.port}",
    }  # fmt: skip
    begin = (
        "import json, os, sys\n"
        "from mooncake.store import MooncakeDistributedStore\n"
        "names = json.loads(sys.argv[1])\n"
        "s = MooncakeDistributedStore()\n"
        f"assert not s.setup({setup})\n"
    )
    end = "\nsys.stdout.flush()\nos._exit(0)\n"
    command = [sys.executable, "-c", begin + code + end, json.dumps(names)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def test_a_record_lies_in_the_cluster_as_it_is_in_every_store(cluster):
    with connect(cluster, prefix="plain:") as store:
        store.put("key", b"some bytes")
        out = raw(cluster, "sys.stdout.buffer.write(s.get(names['key']))", key="plain:key")
    assert out[:8] == b"kvpentry" and out.endswith(b"keysome bytes") and len(out) == 73


def test_two_processes_share_a_cluster(cluster):
    code = (
        "import sys\n"
        "from kvpact.stores import open_store\n"
        "with open_store(sys.argv[1], timeout=20.0, prefix='two:') as store:\n"
        "    assert store.get('ours') == b'1' * 100_000\n"
        "    store.put('theirs', b'2' * 100_000)\n"
        "    print(sorted(store))\n"
    )
    with connect(cluster, prefix="two:") as store:
        store.put("ours", b"1" * 100_000)
        command, pipe = [sys.executable, "-c", code, cluster.url], subprocess.PIPE
        out = subprocess.run(command, stdout=pipe, text=True, check=True, timeout=120).stdout
        assert out.strip() == "['ours', 'theirs']"
        assert store.get("theirs") == b"2" * 100_000


def test_keys_of_others_are_left_alone(cluster):
    """Another store's with a longer prefix, and an application's."""
    keys = ["mine:b:a", "mine:no key", "mine:a/b", "other", "mine:"]
    with connect(cluster, prefix="mine:") as store:
        store.put("a", b"1")
        raw(cluster, "for key in names['keys']:\n    assert s.put(key, b'text') == 0", keys=keys)
        assert list(store) == ["a"]
        stats = store.stats()
        assert (stats.entries, stats.bytes) == (1, 62)
        raw(cluster, "assert s.put('mine:c', b'damaged') == 0")
        report = store.gc(verify=True)
        assert (report.damaged, report.freed) == (1, 7)
        for key in keys:
            out = raw(cluster, "sys.stdout.buffer.write(s.get(names['key']))", key=key)
            assert out == b"text"
        assert store.get("a") == b"1"


def test_the_command_line(cluster):
    url = cluster.url + "&prefix=cli:&timeout=20"
    with open_store(url) as store:
        for index in range(3):
            store.put(f"k{index}", bytes(1000))
        raw(cluster, "s.remove('cli:k1', True); s.put('cli:k1', b'damaged')")
        assert good("store", "ls", url).split() == ["k0", "k1", "k2"]
        assert "MooncakeStore" in good("store", "stats", url)
        assert "7 B freed" in good("store", "gc", url, "--verify")
        assert sorted(store) == ["k0", "k2"]


def test_without_the_masters_http_server_entries_are_there_and_not_listed(cluster):
    url = cluster.url.replace(str(cluster.admin), str(cluster.port))
    with MooncakeStore(url, prefix="list:", timeout=20.0) as store:
        store.put("a", b"1")
        assert store.get("a") == b"1" and "a" in store
        for call in (lambda: list(store), lambda: store.gc(verify=True)):
            with pytest.raises(StoreUnavailable, match=r"does not list keys.*admin="):
                call()
        with pytest.warns(StoreWarning, match="admin="):
            assert store.stats().entries is None
        assert store.get("a") == b"1"


def test_an_entry_is_at_most_a_quarter_of_the_buffer(cluster):
    small_one = connect(cluster, prefix="large:", buffer_size="4MiB")
    with small_one as small, connect(cluster, prefix="large:") as large:
        small.put("a", bytes((1 << 20) - 61))
        assert small.get("a") == bytes((1 << 20) - 61)
        with pytest.raises(StoreFull, match="a quarter of buffer_size=4194304"):
            small.put("a", bytes((1 << 20) - 60))
        assert small.get("a") == bytes((1 << 20) - 61)
        large.put("a", bytes(1 << 20))
        with pytest.warns(StoreWarning, match="larger than a quarter of buffer_size=4194304"):
            assert small.get("a") is None
        assert large.get("a") == bytes(1 << 20)


def test_a_cluster_without_memory_refuses(master):
    with connect(master) as store:
        with pytest.raises(StoreFull, match="segment_size="):
            store.put("a", b"1")
        assert store.get("a") is None and list(store) == []
        with connect(master, segment_size=16 << 20):
            store.put("a", b"1")
            assert store.get("a") == b"1"


def test_a_full_cluster_drops_or_refuses(master):
    """Whatever can be read is right, and what was refused is not there."""
    with connect(master, segment_size=16 << 20) as store:
        refused = set()
        for index in range(60):
            try:
                store.put(f"k{index}", bytes([index]) * (1 << 20))
            except StoreFull:
                refused.add(index)
            else:
                assert store.get(f"k{index}") == bytes([index]) * (1 << 20)
        found = {i: store.get(f"k{i}") for i in range(60)}
        held = {index for index, blob in found.items() if blob is not None}
        assert all(found[index] == bytes([index]) * (1 << 20) for index in held)
        assert 5 < len(held) < 16 and refused and not held & refused
        assert store.stats().damaged == 0
        with pytest.raises(StoreFull):
            store.put("large", bytes(17 << 20))
        assert any(store.get(f"k{i}") is not None for i in held)
