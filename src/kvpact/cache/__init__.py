"""Where slots live; `check_layer`, `check_tokens` and `check_query` serve caches of others, too."""

from kvpact.cache.checks import check_layer, check_query, check_tokens
from kvpact.cache.codecs import cache_specs
from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.create import create_cache
from kvpact.cache.latent import MLACache
from kvpact.cache.paged import PagedKVCache
from kvpact.cache.paged_view import PagedView
from kvpact.cache.plain import KVCache, KVSnapshot
from kvpact.cache.protocol import EngineCache
from kvpact.cache.recode import recode
from kvpact.cache.stats import bytes_per_token, planned_bytes, stream_facts, unplanned
from kvpact.cache.step import Step

__all__ = [
    "ContiguousCache",
    "EngineCache",
    "KVCache",
    "KVSnapshot",
    "MLACache",
    "PagedKVCache",
    "PagedView",
    "Step",
    "bytes_per_token",
    "cache_specs",
    "check_layer",
    "check_query",
    "check_tokens",
    "create_cache",
    "planned_bytes",
    "recode",
    "stream_facts",
    "unplanned",
]
