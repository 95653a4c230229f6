"""Options of the connector, and the store that both its sides share."""

import pytest

from kvpact.errors import StoreError
from kvpact.integrations.vllm.connector_store import options_of, release_store, share_store
from kvpact.stores import open_store


@pytest.mark.parametrize(("extra", "reason"), [
    ({}, "it needs a store"),
    ({"store": "memory://", "time": 3}, "there is no 'time'"),
    ({"store": "memory://", "timeout": 0}, "timeout can't be 0"),
    ({"store": "memory://", "chunk": "64"}, "chunk can't be '64'"),
    ({"store": 5}, "store can't be 5"),
    ({"store": "memory://", "secret_file": ""}, "secret_file can't be ''"),
])  # fmt: skip
def test_options_are_checked(extra, reason):
    with pytest.raises(StoreError, match=reason):
        options_of(extra)


def test_both_sides_of_a_process_have_one_store(tmp_path):
    options = options_of({"store": str(tmp_path / "store")})
    first, second = share_store(options), share_store(options)
    assert first is second
    release_store(options)
    first.put("key", b"blob")
    release_store(options)
    with pytest.raises(StoreError, match="closed"):
        first.get("key")


def test_entries_are_sealed_with_the_secret_of_a_file(tmp_path):
    pytest.importorskip("cryptography")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    folder = str(tmp_path / "store")
    options = options_of({"store": folder, "secret_file": str(secret)})
    share_store(options).put("key", b"blob")
    release_store(options)
    with open_store(folder, secret=secret.read_bytes()) as sealed:
        assert sealed.get("key") == b"blob"
    with open_store(folder) as plain:
        assert b"blob" not in plain.get("key")


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_secret_is_a_file_of_32_bytes(tmp_path, content):
    pytest.importorskip("cryptography")
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    options = options_of({"store": "memory://", "secret_file": str(secret)})
    with pytest.raises(StoreError, match=r"no secret_file|32 random bytes"):
        share_store(options)
