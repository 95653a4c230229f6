"""Records, encryption, background writes, `open_store`."""

import secrets
import sys
import traceback

import pytest

from kvpact import stores
from kvpact.errors import (
    BackendUnavailable,
    FormatError,
    IntegrityError,
    KVPactError,
    StoreError,
    StoreFull,
)
from kvpact.stores import records as records_module
from kvpact.stores.records import peek, seal, unseal

# --- records ---------------------------------------------------------------------------------


def record_of(key="key", blob=b"some bytes", created=1.5):
    return b"".join(seal(key, memoryview(blob), created))


def test_the_bytes_of_a_record_stay_as_they_are():
    assert record_of().hex() == (
        "6b7670656e747279"
        "f561ba68fbc8287390dcde96db0048a5a0e5067d37edb88c401050f85575023d"
        "01000300000000000000f83f0a000000000000006b6579736f6d65206279746573"
    )
    entry = unseal("key", record_of())
    assert (entry.key, entry.created, entry.blob) == ("key", 1.5, b"some bytes")


def test_every_flipped_bit_and_every_length_is_refused():
    record = record_of()
    for bit in range(len(record) * 8):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            unseal("key", bytes(changed))
    for length in range(len(record)):
        with pytest.raises(IntegrityError):
            unseal("key", record[:length])
        with pytest.raises((IntegrityError, FormatError)):
            peek(record[:length], length)
    with pytest.raises(IntegrityError, match="is that of key"):
        unseal("other", record)


def test_an_entry_of_a_later_version_is_a_miss_and_stays(monkeypatch):
    monkeypatch.setattr(records_module, "VERSION", 2)
    later = record_of("a")
    monkeypatch.undo()
    store = stores.MemoryStore()
    store.put("a", b"1")
    store._records["a"] = (later, 0.0)
    with pytest.warns(stores.StoreWarning, match="version 2"):
        assert store.get("a") is None
    assert "a" in store and store.gc(verify=True).damaged == 0
    assert store.stats().damaged == 0


# --- encryption ------------------------------------------------------------------------------

SECRET = secrets.token_bytes(32)


def test_nothing_of_a_blob_can_be_read_in_the_store():
    inner = stores.MemoryStore()
    store = stores.EncryptedStore(inner, SECRET)
    for key in ("a", "b", "a"):
        store.put(key, b"plain text " * 20)
    sealed = [inner.get("a"), inner.get("b")]
    assert all(b"plain" not in blob for blob in sealed)
    store.put("a", b"plain text " * 20)
    sealed.append(inner.get("a"))
    assert len({blob[17:29] for blob in sealed}) == 3, "a nonce was used twice"


def test_an_entry_moved_by_one_who_can_write_is_a_miss_and_removed():
    """Whoever can write can also make good checksums; the key is authenticated, too."""
    inner = stores.MemoryStore()
    store = stores.EncryptedStore(inner, SECRET)
    store.put("a", b"1")
    inner.put("b", inner.get("a"))
    forged = bytearray(inner.get("a"))
    forged[-1] ^= 1
    inner.put("c", forged)
    hits = store.stats().hits
    for key in ("b", "c"):
        with pytest.warns(stores.StoreWarning, match="forged"):
            assert store.get(key) is None
        assert key not in store
    stats = store.stats()
    assert (stats.damaged, stats.hits - hits, stats.misses) == (2, 0, 2)
    assert store.get("a") == b"1"


@pytest.mark.parametrize("other", ["secret", "cipher", "plain"])
def test_entries_of_another_secret_are_misses_and_stay(other):
    inner = stores.MemoryStore()
    if other == "plain":
        inner.put("a", b"never sealed")
    elif other == "secret":
        stores.EncryptedStore(inner, secrets.token_bytes(32)).put("a", b"1")
    else:
        stores.EncryptedStore(inner, SECRET, cipher="chacha20-poly1305").put("a", b"1")
    store = stores.EncryptedStore(inner, SECRET)
    with pytest.warns(stores.StoreWarning, match="sealed"):
        assert store.get("a") is None
    assert "a" in inner and store.stats().damaged == 0


@pytest.mark.parametrize("secret", [b"", b"short", bytes(33), "text" * 8, None])
def test_a_bad_secret_is_refused(secret):
    with pytest.raises(StoreError, match="32 random bytes"):
        stores.EncryptedStore(stores.MemoryStore(), secret)
    with pytest.raises(StoreError, match="known"):
        stores.EncryptedStore(stores.MemoryStore(), SECRET, cipher="rot13")


# --- fsspec ----------------------------------------------------------------------------------


def test_fsspec_files_of_killed_writers_go_after_a_day(tmp_path):
    with stores.FsspecStore(f"file://{tmp_path}/s") as store:
        store.put("a", b"1")
        for begun in (1_000_000_000, 99_999_999_999):
            (tmp_path / "s" / f"{begun}-0123456789abcdef.part").write_bytes(b"torn")
        (tmp_path / "s" / "notes.txt").write_text("not ours")
        assert list(store) == ["a"] and store.stats().entries == 1
        report = store.gc()
        assert (report.leftovers, report.freed) == (1, 4)
        assert len(list((tmp_path / "s").iterdir())) == 3


def test_a_file_system_that_fails_is_a_miss_or_a_named_error(monkeypatch):
    with stores.FsspecStore("memory://failing/s") as store:
        store.put("a", b"1")

        def fail(*args, **kwargs):
            raise RuntimeError("throttled")

        for name in ("cat_file", "pipe_file", "exists", "find"):
            monkeypatch.setattr(store._fs, name, fail)
        with pytest.warns(stores.StoreWarning, match="throttled"):
            assert store.get("a") is None
        with pytest.warns(stores.StoreWarning, match="throttled"):
            assert "a" not in store
        with pytest.raises(StoreError, match="throttled"):
            store.put("a", b"2")
        with pytest.warns(stores.StoreWarning):
            stats = store.stats()
        assert (stats.entries, stats.errors) == (None, 4)
        monkeypatch.undo()
        assert store.get("a") == b"1"


@pytest.mark.parametrize("url", [
    "memory://bucket/s?sig=SECRET", "memory://user:SECRET@bucket/s?sig=SECRET",
    "memory://user:SEC?RET@bucket/s", "memory://bucket/s?sig=SEC@RET",
])  # fmt: skip
def test_credentials_in_a_url_are_not_shown(url, monkeypatch):
    texts = []
    with stores.FsspecStore(url) as store:
        texts.append(repr(store))

        def fail(*args, **kwargs):
            raise RuntimeError(f"403, url='https://user:SECRET@host/a?sig={url}'")

        monkeypatch.setattr(store._fs, "pipe_file", fail)
        monkeypatch.setattr(store._fs, "cat_file", fail)
        told = r"RuntimeError: 403, url='https://host/a\?...'"
        with pytest.raises(StoreError, match=told) as raised:
            store.put("a", b"1")
        texts += traceback.format_exception_only(raised.value)
        assert raised.value.__cause__ is None and raised.value.__suppress_context__
        with pytest.warns(stores.StoreWarning, match="403") as caught:
            assert store.get("a") is None
        texts += [str(warning.message) for warning in caught]
    for text in texts:
        assert "memory://" in text and "SEC" not in text and "RET" not in text


# --- open_store ------------------------------------------------------------------------------


def test_every_url_has_its_store(tmp_path):
    for url, kind in (
        ("memory://", stores.MemoryStore),
        (tmp_path / "a", stores.DirectoryStore),
        (str(tmp_path / "b"), stores.DirectoryStore),
        ((tmp_path / "c d").as_uri(), stores.DirectoryStore),
        (f"local://{tmp_path}/d", stores.FsspecStore),
    ):
        with stores.open_store(url) as store:
            assert type(store) is kind
            store.put("a", b"1")
            assert store.get("a") == b"1"
    assert (tmp_path / "c d" / "blobs").is_dir()


def test_open_store_passes_options_on_and_wraps(tmp_path):
    with stores.open_store(tmp_path / "s", secret=SECRET, background=True, max_bytes=2000) as store:
        assert isinstance(store, stores.BackgroundStore)
        store.put("a", b"plain")
        store.flush()
        assert store.get("a") == b"plain"
    with stores.open_store(tmp_path / "s") as store:
        assert b"plain" not in store.get("a")
    with stores.open_store("memory://", max_bytes=10) as store, pytest.raises(StoreFull):
        store.put("a", b"1")


@pytest.mark.parametrize(("url", "options"), [
    ("memory://", {"maxbytes": 5}), ("memory://", {"ttl": 0}), ("memory://", {"max_bytes": -1}),
    ("memory://somewhere", {}), ("file://host/path", {}), ("nosuchscheme://x", {}),
    ("memory://", {"secret": b"short"}),
])  # fmt: skip
def test_bad_urls_and_options_are_named(url, options):
    with pytest.raises(KVPactError):
        stores.open_store(url, **options)


@pytest.mark.parametrize(("module", "extra", "make"), [
    ("redis", "redis", lambda: stores.open_store("redis://localhost")),
    ("fsspec", "remote", lambda: stores.open_store("s3://bucket")),
    ("cryptography", "encryption", lambda: stores.open_store("memory://", secret=SECRET)),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, extra, make):
    for name in [m for m in sys.modules if m.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable, match=rf"pip install 'kvpact\[{extra}\]'"):
        make()
