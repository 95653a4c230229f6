"""Keys and blobs of this version: what a store holds has to be found and read by later ones."""

import hashlib

import torch

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.stores import MemoryStore

GEOMETRY = CacheGeometry(2, 1, 32, dtype=torch.float16)
IDS = [n * 7 % 50 for n in range(130)]
KEYS = [
    "994f300dbb3e5f6f76bf536d22512548749db91f736e4ee3bbf2f1d99b977b14",
    "844a945413f7a012e009a57815067e47ca6bd87ade9fc3d93cf9bb211ac718d2",
]
BLOBS = [
    "c344bae589379837cf1156bf2ee0ff569e587f3a98b47475146e9ad39ec05b23",
    "7080a10dcca086e4e9a15d4187a5bfc959a0385eb309b50e4094fea376be3daf",
]


def test_keys_and_blobs_are_those_of_version_1():
    """Another key makes a store's entries useless; then VERSION in `prefixes.chunks` is raised."""
    cache = create_cache("int:bits=4", GEOMETRY)
    rows = torch.tensor(IDS)[:, None] + torch.arange(32) * 3
    for layer in range(2):
        x = ((rows * (layer + 1)) % 17 - 8).to(torch.float16)[None, None]
        cache.prefill(layer, x, -x)
    with MemoryStore() as store:
        prefixes = PrefixCache(store, cache, model="golden", adapter="a", tenant="t")
        assert prefixes.save(IDS) == 2
        assert prefixes.keys(IDS) == KEYS
        blobs = [store.get(key) for key in KEYS]
    digests = [hashlib.blake2b(blob, digest_size=32).hexdigest() for blob in blobs]
    assert digests == BLOBS
