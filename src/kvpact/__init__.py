"""kvpact: one contract between LLM inference engines and KV-cache compression.

Names are imported when they are first used: what needs no tensors, such as ``kvpact --help``, does
not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvpact import errors

if TYPE_CHECKING:
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

_NAMES = {
    "kvpact.cache": (
        "ContiguousCache",
        "EngineCache",
        "KVCache",
        "KVSnapshot",
        "MLACache",
        "PagedKVCache",
        "PagedView",
        "Step",
        "create_cache",
        "recode",
    ),
    "kvpact.calibration": ("Calibration",),
    "kvpact.compressor": (
        "CompressedKV",
        "KVCacheCompressor",
    ),
    "kvpact.contract": (
        "AttendConfig",
        "CompressedKVCache",
        "DecodeOutput",
        "DequantResult",
        "Dequantized",
        "Fused",
        "KVTile",
    ),
    "kvpact.errors": ("KVPactError",),
    "kvpact.geometry": ("CacheGeometry",),
    "kvpact.key_offset": ("KeyOffset",),
    "kvpact.methods.hybrid": ("Hybrid",),
    "kvpact.methods.lowrank": ("LowRank",),
    "kvpact.methods.vq": ("VectorQuantization",),
    "kvpact.prefixes": ("PrefixCache",),
    "kvpact.registry": (
        "list_methods",
        "register_method",
    ),
    "kvpact.snapshot": ("Snapshot",),
    "kvpact.spec": (
        "Spec",
        "parse_spec",
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # to a type checker, a misspelt name is an error

    def __getattr__(name: str) -> object:
        """Import what stands in `__all__`, or a package of kvpact, when it is first asked for."""
        if name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        elif not name.startswith("_") and find_spec(f"kvpact.{name}") is not None:
            return import_module(f"kvpact.{name}")
        else:
            raise AttributeError(f"module 'kvpact' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
