"""kvpact: one contract between LLM inference engines and KV-cache compression.

Names are imported when they are first used: what needs no tensors, such as ``kvpact --help``, does
not wait for torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvpact import errors as errors

if TYPE_CHECKING:  # each name again, so that type checkers know it as public
    from kvpact.cache import ContiguousCache as ContiguousCache
    from kvpact.cache import EngineCache as EngineCache
    from kvpact.cache import KVCache as KVCache
    from kvpact.cache import KVSnapshot as KVSnapshot
    from kvpact.cache import MLACache as MLACache
    from kvpact.cache import PagedKVCache as PagedKVCache
    from kvpact.cache import PagedView as PagedView
    from kvpact.cache import Step as Step
    from kvpact.cache import create_cache as create_cache
    from kvpact.cache import recode as recode
    from kvpact.calibration import Calibration as Calibration
    from kvpact.compressor import CompressedKV as CompressedKV
    from kvpact.compressor import KVCacheCompressor as KVCacheCompressor
    from kvpact.contract import AttendConfig as AttendConfig
    from kvpact.contract import CompressedKVCache as CompressedKVCache
    from kvpact.contract import DecodeOutput as DecodeOutput
    from kvpact.contract import Dequantized as Dequantized
    from kvpact.contract import DequantResult as DequantResult
    from kvpact.contract import Fused as Fused
    from kvpact.contract import KVTile as KVTile
    from kvpact.errors import KVPactError as KVPactError
    from kvpact.geometry import CacheGeometry as CacheGeometry
    from kvpact.integrations.models import load_model as load_model
    from kvpact.integrations.sizes import size as size
    from kvpact.integrations.transformers import CompressedCache as CompressedCache
    from kvpact.integrations.transformers import calibration_of as calibration_of
    from kvpact.integrations.transformers import disable as disable
    from kvpact.integrations.transformers import enable as enable
    from kvpact.key_offset import KeyOffset as KeyOffset
    from kvpact.methods.hybrid import Hybrid as Hybrid
    from kvpact.methods.lowrank import LowRank as LowRank
    from kvpact.methods.vq import VectorQuantization as VectorQuantization
    from kvpact.prefixes import PrefixCache as PrefixCache
    from kvpact.registry import list_methods as list_methods
    from kvpact.registry import register_method as register_method
    from kvpact.snapshot import Snapshot as Snapshot
    from kvpact.spec import Spec as Spec
    from kvpact.spec import parse_spec as parse_spec

__version__ = "0.1.0"

_NAMES = {
    "kvpact.cache": "ContiguousCache EngineCache KVCache KVSnapshot MLACache PagedKVCache "
    "PagedView Step create_cache recode",
    "kvpact.calibration": "Calibration",
    "kvpact.compressor": "CompressedKV KVCacheCompressor",
    "kvpact.contract": "AttendConfig CompressedKVCache DecodeOutput DequantResult Dequantized "
    "Fused KVTile",
    "kvpact.errors": "KVPactError",
    "kvpact.geometry": "CacheGeometry",
    "kvpact.integrations.models": "load_model",
    "kvpact.integrations.sizes": "size",
    "kvpact.integrations.transformers": "CompressedCache calibration_of disable enable",
    "kvpact.key_offset": "KeyOffset",
    "kvpact.methods.hybrid": "Hybrid",
    "kvpact.methods.lowrank": "LowRank",
    "kvpact.methods.vq": "VectorQuantization",
    "kvpact.prefixes": "PrefixCache",
    "kvpact.registry": "list_methods register_method",
    "kvpact.snapshot": "Snapshot",
    "kvpact.spec": "Spec parse_spec",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # to a type checker, a misspelt name is an error
    # All that needs torch and numpy alone: `from kvpact import *` works without transformers.
    __all__ = ["errors", *(x for x, home in _HOMES.items() if not home.endswith("transformers"))]

    def __getattr__(name: str) -> object:
        """Import what stands in `__all__`, or a package of kvpact, when it is first asked for."""
        if name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        elif not name.startswith("_") and find_spec(f"kvpact.{name}") is not None:
            return import_module(f"kvpact.{name}")
        else:
            text = f"module 'kvpact' has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[__name__])  # Python adds a hint
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
