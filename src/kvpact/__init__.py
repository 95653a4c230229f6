"""kvpact: one contract between LLM inference engines and KV-cache compression."""

from kvpact import errors
from kvpact.cache import ContiguousCache, PagedKVCache, create_cache
from kvpact.contract import (
    AttendConfig,
    CompressedKVCache,
    DecodeOutput,
    Dequantized,
    DequantResult,
    Fused,
    KVTile,
)
from kvpact.errors import KVPactError
from kvpact.geometry import CacheGeometry
from kvpact.registry import list_methods, register_method
from kvpact.spec import Spec, parse_spec

__version__ = "0.1.0"

__all__ = [
    "AttendConfig",
    "CacheGeometry",
    "CompressedKVCache",
    "ContiguousCache",
    "DecodeOutput",
    "DequantResult",
    "Dequantized",
    "Fused",
    "KVPactError",
    "KVTile",
    "PagedKVCache",
    "Spec",
    "create_cache",
    "errors",
    "list_methods",
    "parse_spec",
    "register_method",
]
