"""The conformance class on every store that needs no server."""

import secrets

import pytest

from kvpact.stores import BackgroundStore, DirectoryStore, EncryptedStore, FsspecStore, MemoryStore
from kvpact.testing import StoreContract


class TestMemoryStore(StoreContract):
    persistent = False
    budget = expires = True

    def make_store(self, place, **options):
        return MemoryStore(**options)

    def tamper(self, store, key, edit):
        record, created = store._records[key]
        store._records[key] = (edit(record), created)


class TestDirectoryStore(StoreContract):
    budget = expires = True

    def make_store(self, place, **options):
        return DirectoryStore(place / "store", **options)

    def tamper(self, store, key, edit):
        (file,) = store._files.of_key(key)
        path = store._files.folder / file
        path.write_bytes(edit(path.read_bytes()))


class TestFsspecMemory(StoreContract):
    expires = True

    def make_store(self, place, **options):
        return FsspecStore(f"memory://{place}/store", **options)

    def tamper(self, store, key, edit):
        path = store._path(key)
        store._fs.pipe_file(path, edit(store._fs.cat_file(path)))


class TestFsspecFiles(TestFsspecMemory):
    def make_store(self, place, **options):
        return FsspecStore(f"file://{place}/store", **options)


SECRET = secrets.token_bytes(32)


class Around:
    """Of a store around another one, which holds the records."""

    def tamper(self, store, key, edit):
        super().tamper(store._inner, key, edit)


class TestBackgroundStore(Around, TestDirectoryStore):
    def make_store(self, place, **options):
        return BackgroundStore(super().make_store(place, **options))


class TestEncryptedStore(Around, TestMemoryStore):
    def make_store(self, place, **options):
        return EncryptedStore(super().make_store(place, **options), SECRET)


class TestEncryptedChaCha(Around, TestDirectoryStore):
    def make_store(self, place, **options):
        inner = super().make_store(place, **options)
        return EncryptedStore(inner, SECRET, cipher="chacha20-poly1305")


@pytest.fixture(autouse=True)
def forget_fsspec_files():
    import fsspec.implementations.memory as memory

    yield
    memory.MemoryFileSystem.store.clear()
