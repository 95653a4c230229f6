"""How often a load of a prefix hashes and copies each byte that the store holds of it."""

import hashlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.stores import DirectoryStore, EncryptedStore, records

from .conftest import fill

WIDE, SPEC = CacheGeometry(2, 4, 128, 128, torch.float32), "int:bits=8,window=0"
COPIES = {"clone", "copy_", "cat", "stack", "_to_copy", "index_select"}


class Passes(TorchDispatchMode):
    """Counts the bytes that go through BLAKE2b, and those that torch copies."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.hashed, self.copied, blake2b = 0, 0, hashlib.blake2b

        class Counted:
            def __init__(own, data=b"", **options):
                own.digest_of = blake2b(**options)
                own.digest, own.hexdigest = own.digest_of.digest, own.digest_of.hexdigest
                own.update(data)

            def update(own, data):
                self.hashed += memoryview(data).nbytes
                own.digest_of.update(data)

        for owner in (hashlib, records):
            monkeypatch.setattr(owner, "blake2b", Counted)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result, name = op(*args, **(kwargs or {})), op.overloadpacket.__name__
        self.copied += result.nbytes if name in COPIES else 0
        return result


@pytest.mark.parametrize(("storage", "copies"), [(None, 3), ("int:bits=8,window=0,sinks=0", 5)])
@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["plain", "encrypted"])
def test_each_byte_is_hashed_once(tmp_path, monkeypatch, storage, copies, secret):
    with DirectoryStore(tmp_path) as folder:
        store = folder if secret is None else EncryptedStore(folder, secret)
        loaded, whole = create_cache(SPEC, WIDE), fill(create_cache(SPEC, WIDE), list(range(1024)))
        mine, other = (PrefixCache(store, x, model="m", storage=storage) for x in (loaded, whole))
        assert other.save(range(1024)) == 16
        size, passes = folder.stats().bytes, Passes(monkeypatch)
        with passes:
            assert mine.load(range(1024)) == 1024
    assert 0.9 < passes.hashed / size < 1.1 and 0.9 < passes.copied / size < copies + 0.1
