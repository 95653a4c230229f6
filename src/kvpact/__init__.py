"""kvpact: one contract between LLM inference engines and KV-cache compression."""

from kvpact import errors
from kvpact.cache import (
    ContiguousCache,
    EngineCache,
    KVCache,
    KVSnapshot,
    MLACache,
    PagedKVCache,
    PagedView,
    Step,
    create_cache,
    recode,
)
from kvpact.calibration import Calibration
from kvpact.compressor import CompressedKV, KVCacheCompressor
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
from kvpact.key_offset import KeyOffset
from kvpact.methods.hybrid import Hybrid
from kvpact.methods.lowrank import LowRank
from kvpact.methods.vq import VectorQuantization
from kvpact.prefixes import PrefixCache
from kvpact.registry import list_methods, register_method
from kvpact.snapshot import Snapshot
from kvpact.spec import Spec, parse_spec

__version__ = "0.1.0"

__all__ = [
    "AttendConfig",
    "CacheGeometry",
    "Calibration",
    "CompressedKV",
    "CompressedKVCache",
    "ContiguousCache",
    "DecodeOutput",
    "DequantResult",
    "Dequantized",
    "EngineCache",
    "Fused",
    "Hybrid",
    "KVCache",
    "KVCacheCompressor",
    "KVPactError",
    "KVSnapshot",
    "KVTile",
    "KeyOffset",
    "LowRank",
    "MLACache",
    "PagedKVCache",
    "PagedView",
    "PrefixCache",
    "Snapshot",
    "Spec",
    "Step",
    "VectorQuantization",
    "create_cache",
    "errors",
    "list_methods",
    "parse_spec",
    "recode",
    "register_method",
]
