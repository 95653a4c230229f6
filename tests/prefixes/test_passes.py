"""How often a load of a prefix hashes and copies each byte that the store holds of it."""

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.snapshot import Container
from kvpact.stores import DirectoryStore, EncryptedStore, records

from .conftest import fill

WIDE = CacheGeometry(2, 4, 128, 128, torch.float32)
SPEC = "int:bits=8,window=0"
COPIES = {"clone", "copy_", "cat", "stack", "_to_copy", "index_select"}


class Hashes:
    """Counts what goes through BLAKE2b."""

    def __init__(self, monkeypatch):
        self.bytes, real = 0, hashlib.blake2b
        counts = self

        class Counted:
            def __init__(self, data=b"", **options):
                self._digest = real(**options)
                self.update(data)

            def update(self, data):
                counts.bytes += memoryview(data).nbytes
                self._digest.update(data)

            def __getattr__(self, name):
                return getattr(self._digest, name)

        for owner in (hashlib, records):
            monkeypatch.setattr(owner, "blake2b", Counted)


class Copies(TorchDispatchMode):
    """Counts the bytes that torch copies, and those of sections that are read."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.bytes, section = 0, Container.section

        def counted(container, *where):
            data = section(container, *where)
            self.bytes += data.nbytes
            return data

        monkeypatch.setattr(Container, "section", counted)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in COPIES:
            self.bytes += result.nbytes
        return result


@pytest.mark.parametrize("storage", [None, "int:bits=8,window=0,sinks=0"])
@pytest.mark.parametrize("secret", [None, bytes(32)])
def test_each_byte_is_hashed_once_and_copied_four_times(tmp_path, monkeypatch, storage, secret):
    ids = list(range(1000, 1000 + 1024))
    with DirectoryStore(tmp_path) as folder:
        store = folder if secret is None else EncryptedStore(folder, secret)
        whole = fill(create_cache(SPEC, WIDE), ids)
        assert PrefixCache(store, whole, model="m", storage=storage).save(ids) == 16
        size = folder.stats().bytes
        cache = create_cache(SPEC, WIDE)
        prefixes = PrefixCache(store, cache, model="m", storage=storage)
        hashes, copies = Hashes(monkeypatch), Copies(monkeypatch)
        with copies:
            assert prefixes.load(ids) == 1024
    print(f"hashed {hashes.bytes / size:.2f} times, copied {copies.bytes / size:.2f} times")
    assert 0.9 < hashes.bytes / size < 1.1
    if storage is None:
        assert copies.bytes / size < 4.2
