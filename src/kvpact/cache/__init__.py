"""Where slots live."""

from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.create import create_cache
from kvpact.cache.paged import PagedKVCache
from kvpact.cache.paged_view import PagedView
from kvpact.cache.sequences import Page
from kvpact.cache.stats import bytes_per_token, merge_stats, planned_bytes
from kvpact.cache.step import Step

__all__ = [
    "ContiguousCache",
    "Page",
    "PagedKVCache",
    "PagedView",
    "Step",
    "bytes_per_token",
    "create_cache",
    "merge_stats",
    "planned_bytes",
]
