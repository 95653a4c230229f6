"""kvpact: one contract between LLM inference engines and KV-cache compression.

Names are imported when they are first used: what needs no tensors, such as ``kvpact --help``, does
not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from os import environ
from sys import _getframe
from typing import TYPE_CHECKING
from warnings import warn

from kvpact import errors as errors

if TYPE_CHECKING:  # each name again, so that type checkers know it as public
    from kvpact.cache import MLACache as MLACache
    from kvpact.cache import PagedKVCache as PagedKVCache
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
    from kvpact.integrations.transformers import FallbackWarning as FallbackWarning
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
    "kvpact.cache": "MLACache PagedKVCache Step create_cache recode",
    "kvpact.calibration": "Calibration",
    "kvpact.compressor": "CompressedKV KVCacheCompressor",
    "kvpact.contract": "AttendConfig CompressedKVCache DecodeOutput DequantResult Dequantized "
    "Fused KVTile",
    "kvpact.errors": "KVPactError",
    "kvpact.geometry": "CacheGeometry",
    "kvpact.integrations.models": "load_model",
    "kvpact.integrations.sizes": "size",
    "kvpact.integrations.transformers": "CompressedCache FallbackWarning calibration_of disable "
    "enable",
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

_VARIABLES = (
    *("CACHE", "GGML_ALL", "GGML_COUNT", "GGML_F16", "GGML_LIBRARY", "GGML_SIMD", "MALLOC"),
    *("NATIVE", "SIMD", "STORE_PASSWORD", "VLLM_CALIBRATION", "VLLM_SPEC"),
)
for _name in {x for x in environ if x.startswith("KVPACT_")} - {f"KVPACT_{x}" for x in _VARIABLES}:
    warn(
        f"there is no variable {_name}, docs/install.md has all; write: "
        "CompressedCache(model, spec, backend=...), and for threads OMP_NUM_THREADS",
        stacklevel=2,
    )
if not TYPE_CHECKING:  # to a type checker, a misspelt name is an error
    _missing = "" if find_spec("transformers") else "kvpact.integrations.transformers"
    __all__ = ["errors", "evaluate", "recommend", *(x for x, y in _HOMES.items() if y != _missing)]

    def __getattr__(name: str) -> object:
        """Import what stands in `__all__`, or a package of kvpact, when it is first asked for."""
        if name in _HOMES:
            home = import_module(_HOMES[name])
            found = import_module("kvpact.callable_package").told(getattr(home, name))
            setattr(home, name, found)
        elif not name.startswith("_") and find_spec(f"kvpact.{name}") is not None:
            return import_module(f"kvpact.{name}")
        else:
            from kvpact.callable_package import absent  # takes as long as all else here

            raise absent("kvpact", name, _getframe(1))
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        own = {*globals()} - {"TYPE_CHECKING", "_getframe", "find_spec", "import_module"}
        return sorted({*own, *_HOMES, *__all__})
