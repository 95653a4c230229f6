"""Where slots live."""

from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.create import create_cache
from kvpact.cache.latent import MLACache
from kvpact.cache.paged import PagedKVCache
from kvpact.cache.paged_view import PagedView
from kvpact.cache.plain import KVCache
from kvpact.cache.plain_state import KVSnapshot
from kvpact.cache.sequences import Page
from kvpact.cache.specs import cache_specs
from kvpact.cache.stats import bytes_per_token, merge_stats, planned_bytes, unplanned
from kvpact.cache.step import Step

__all__ = [
    "ContiguousCache",
    "KVCache",
    "KVSnapshot",
    "MLACache",
    "Page",
    "PagedKVCache",
    "PagedView",
    "Step",
    "bytes_per_token",
    "cache_specs",
    "create_cache",
    "merge_stats",
    "planned_bytes",
    "unplanned",
]
