"""Caches; `check_layer`, `check_tokens` and `check_query` serve caches of others, too."""

from kvpact.cache.batch.contiguous import ContiguousCache
from kvpact.cache.batch.mla import MLACache
from kvpact.cache.checks import check_layer, check_query, check_tokens
from kvpact.cache.create import create_cache
from kvpact.cache.layer.stored import Step
from kvpact.cache.paged.cache import PagedKVCache
from kvpact.cache.paged.view import PagedView
from kvpact.cache.plain import KVCache, KVSnapshot
from kvpact.cache.protocol import EngineCache
from kvpact.cache.recode import recode
from kvpact.cache.stats import bytes_per_token, planned_bytes, stream_facts, unplanned
from kvpact.cache.stream.codecs import cache_specs
from kvpact.callable_package import let_tell

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

let_tell(__name__)
