"""Where slots live."""

from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.create import create_cache
from kvpact.cache.stats import bytes_per_token, planned_bytes

__all__ = ["ContiguousCache", "bytes_per_token", "create_cache", "planned_bytes"]
