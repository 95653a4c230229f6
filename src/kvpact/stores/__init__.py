"""Stores: digests to bytes, in memory, in a directory, on a server; encrypted, in the background.

`open_store` opens any of them by URL. A store knows nothing of caches.
"""

from kvpact.callable_package import let_tell
from kvpact.stores.background import BackgroundStore
from kvpact.stores.base import GCReport, Store, StoreStats, StoreWarning
from kvpact.stores.directory import DirectoryStore
from kvpact.stores.encrypted import EncryptedStore
from kvpact.stores.fsspec import FsspecStore
from kvpact.stores.memory import MemoryStore
from kvpact.stores.mooncake import MooncakeStore
from kvpact.stores.open import open_store
from kvpact.stores.redis import RedisStore

__all__ = [
    "BackgroundStore",
    "DirectoryStore",
    "EncryptedStore",
    "FsspecStore",
    "GCReport",
    "MemoryStore",
    "MooncakeStore",
    "RedisStore",
    "Store",
    "StoreStats",
    "StoreWarning",
    "open_store",
]

let_tell(__name__)
