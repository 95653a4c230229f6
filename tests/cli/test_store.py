"""``kvpact store ls|stats|gc``."""

import pytest
from commands import bad, good, invoke, passed

from kvpact.stores import DirectoryStore


@pytest.fixture
def folder(tmp_path):
    with DirectoryStore(tmp_path / "store") as store:
        for index in range(12):
            store.put(f"k{index:02}", bytes(1000))
    return tmp_path / "store"


def test_ls_prints_the_keys(folder):
    listed = good("store", "ls", folder)
    assert listed.split() == [f"k{index:02}" for index in range(12)]
    assert good("store", "ls", folder.as_uri()) == listed


def test_stats_prints_entries_and_bytes(folder):
    lines = good("store", "stats", folder).splitlines()
    line = next(line for line in lines if "DirectoryStore" in line)
    assert line.split()[-5:] == ["12", "12.76", "kB", "1.06", "kB"]


def row(output, name):
    return next(line.split()[-1] for line in output.splitlines() if line.startswith(f" {name}"))


def test_gc_removes_and_says_so(folder):
    file = min(folder.glob("blobs/*/*"))
    file.write_bytes(b"damaged")
    (folder / "tmp" / "left").write_bytes(b"torn")
    result = passed("store", "gc", folder, "--verify")
    assert (row(result.stdout, "damaged"), row(result.stdout, "leftovers")) == ("1", "1")
    assert result.stderr == ""
    told = good("store", "gc", folder, "--max-bytes", 5000)
    assert row(told, "evicted") == "7" and "7.44 kB freed" in told
    assert len(good("store", "ls", folder).split()) == 4
    assert row(good("store", "gc", folder, "--ttl", 1e-9), "expired") == "4"
    assert good("store", "ls", folder) == ""


@pytest.mark.parametrize("command", ["ls", "stats", "gc"])
def test_what_is_no_store_is_one_line(tmp_path, command):
    for url in (tmp_path / "nothing", tmp_path, "nosuchscheme://x"):
        line = bad("store", command, url).strip()
        assert line.startswith("error:") and "\n" not in line
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_said(start_server, tmp_path):
    server = start_server(tmp_path)
    env = {"KVPACT_STORE_PASSWORD": server.password}
    assert invoke("store", "stats", server.url, env=env).exit_code == 0
    assert "refuses user or password" in bad("store", "stats", server.url)
    server.kill()
    for command in ("ls", "stats", "gc"):
        option = "--verify" if command == "gc" else "--password=x"
        assert "does not answer" in bad("store", command, server.url, option)
