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

_LINES = {
    "CompressedCache(model, 'int:bits=4,group=64'); all options stand in the spec": "Config "
    "DynamicCache HQQQuantizedCache QuantizedCache QuantoQuantizedCache",
    "CompressedCache(model); the cache without compression is kvpact.cache's": "KVCache",
    "CompressedCache.load(path, model), or kvpact.Snapshot.load(path)": "load",
    "KVCacheCompressor(spec)": "Compressor",
    "PagedKVCache(spec, geometry, num_pages); for a model of transformers, "
    "kvpact.integrations.transformers.PagedBatch(model.config, cache)": "PagedAttention PagedCache",
    "__version__": "version",
    "calibration_of(model, spec, tokenizer=tokenizer)": "calibrate",
    "data.book_path().read_text('utf-8'), a novel; or a text of yours": "load_dataset",
    "data.model_table()['models'], those that kvpact.size knows": "list_models",
    "enable(model)": "apply compress get_kvpact_model get_peft_model patch quantize wrap",
    "evaluate(model, spec, text, tokenizer=tokenizer); for tasks of lm_eval see docs/guides/lm-eval"
    ".md": "benchmark compute_perplexity perplexity simple_evaluate",
    "integrations.transformers.pressed(model, cache, press); presses are kvpress's": "Press",
    "load_model(name), which returns model and tokenizer": "AutoModel AutoModelForCausalLM "
    "AutoTokenizer load_tokenizer",
    "parse_spec(text).codecs(dim, v_dim, dtype)": "get_codec",
}
_MEANT = {
    **{name: f"kvpact.{line}" for line, names in _LINES.items() for name in names.split()},
    **dict.fromkeys(
        ("delete_calibration", "list_calibrations", "remove_calibration"),
        "os.listdir(folder); calibrations are files in the folder that KVPACT_CACHE names",
    ),
    **dict.fromkeys(
        ("get_num_threads", "set_num_threads"), "torch.set_num_threads(4); kvpact's are torch's"
    ),
    **dict.fromkeys(
        ("LLM", "SamplingParams"), "vllm.LLM(model, kv_cache_dtype='kvpact', block_size=128)"
    ),
    **{
        name: f"from kvpact.cache import {name}"
        for name in ("ContiguousCache", "EngineCache", "KVSnapshot", "PagedView")
    },
    "from_pretrained": "model, tokenizer = kvpact.load_model(name); kvpact.enable(model)",
    "generate": "model.generate(**inputs, cache=kvpact.CompressedCache(model))",
    "save": "cache.save(path)",
}
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
"""Corrections of names that are guessed, or stand elsewhere."""

if not TYPE_CHECKING:  # to a type checker, a misspelt name is an error
    _missing = "" if find_spec("transformers") else "kvpact.integrations.transformers"
    __all__ = ["errors", "evaluate", "recommend", *(x for x, y in _HOMES.items() if y != _missing)]

    def __getattr__(name: str) -> object:
        """Import what stands in `__all__`, or a package of kvpact, when it is first asked for."""
        if name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        elif not name.startswith("_") and find_spec(f"kvpact.{name}") is not None:
            return import_module(f"kvpact.{name}")
        else:
            from difflib import get_close_matches  # takes as long as all else here

            near = get_close_matches(name, {*_HOMES, *__all__}, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            meant = next((end for end in ("Press", "Config") if name.endswith(end)), name)
            hint = f"; write: {_MEANT[meant]}" if meant in _MEANT else hint
            # ``from kvpact import name`` looks here first, and would drop an AttributeError's text.
            asked = _getframe(1).f_code.co_name == "_handle_fromlist"
            error = ImportError if asked and hint else AttributeError
            raise error(f"module 'kvpact' has no attribute {name!r}{hint}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        own = {*globals()} - {"TYPE_CHECKING", "_getframe", "find_spec", "import_module"}
        return sorted({*own, *_HOMES, *__all__})
