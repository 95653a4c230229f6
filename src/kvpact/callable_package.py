"""Packages that are called (``kvpact.evaluate(…)``), and names that are not there."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from kvpact.errors import BackendUnavailable, KVPactError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_PLACES = "cache stores snapshot prefixes evaluate recommend data errors integrations.transformers"
_LINES = {
    "cache.save(path)": "save",
    "kvpact.CompressedCache(model, 'int:bits=4,group=64'); all options stand in the spec": "Config "
    "DynamicCache HQQQuantizedCache QuantizedCache QuantoQuantizedCache",
    "kvpact.CompressedCache(model); the cache without compression is kvpact.cache's": "KVCache "
    "KVPactCache",
    "kvpact.CompressedCache.load(path, model), or kvpact.Snapshot.load(path)": "load",
    "kvpact.KVCacheCompressor(spec)": "Compressor",
    "kvpact.PagedKVCache(spec, geometry, num_pages); for a model of transformers, kvpact."
    "integrations.transformers.PagedBatch(model.config, cache)": "PagedAttention PagedCache",
    "kvpact.__version__": "version",
    "kvpact.calibration_of(model, spec, tokenizer=tokenizer)": "calibrate",
    "kvpact.data.book_path().read_text('utf-8'), a novel; or a text of yours": "load_dataset",
    "kvpact.data.model_table()['models'], those that kvpact.size knows": "list_models",
    "kvpact.enable(model)": "apply compress get_kvpact_model get_peft_model patch quantize wrap",
    "kvpact.evaluate(model, spec, text, tokenizer=tokenizer); for tasks of lm_eval see docs/guides/"
    "lm-eval.md": "benchmark compute_perplexity perplexity simple_evaluate",
    "kvpact.integrations.transformers.pressed(model, cache, press); presses are kvpress's": "Press",
    "kvpact.load_model(name), which returns model and tokenizer": "AutoModel AutoModelForCausalLM "
    "AutoTokenizer load_tokenizer",
    "model, tokenizer = kvpact.load_model(name); kvpact.enable(model)": "from_pretrained",
    "model.generate(**inputs, cache=kvpact.CompressedCache(model))": "generate",
    "os.listdir(folder); calibrations are files in the folder that KVPACT_CACHE names": "delete_"
    "calibration list_calibrations remove_calibration",
    "torch.set_num_threads(4); kvpact's are torch's": "get_num_threads set_num_threads",
    "vllm.LLM(model, kv_cache_dtype='kvpact', block_size=128)": "LLM SamplingParams",
}
_COLD = "__init__ crop evict free load memory_usage mla reset restore save snapshot stats truncate"
_HOT = ("cache", "contract", "geometry", "methods")
_MEANT = {name: line for line, names in _LINES.items() for name in names.split()}
"""Corrections of names that are guessed."""


class CallError(KVPactError, TypeError):
    """A class, a function or a package was called with other arguments than it has."""


def call_line(name: str, function: Callable[..., Any]) -> str:
    """Return a call of a function as a line, with all of its parameters."""
    own = [*inspect.signature(function).parameters.values()]
    own = [x for x in own if x.kind is not x.VAR_KEYWORD and x.name not in ("self", "cls")]
    words = [x.name + "=..." * (x.kind is x.KEYWORD_ONLY) for x in own]
    return f"{name}({', '.join(words)})"


class Told:
    """Names that an object does not have are answered with those that it has."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if isinstance(line := inspect.getattr_static(type(self), name, None), _Absent):
                line.__get__(self, type(self))
            known = "" if name.startswith("_") else ", ".join(x for x in dir(self) if x[0] != "_")
            hint = f"; it has {known}" if known else ""
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{hint}")

        def __getitem__(self, name: object) -> Any:
            return getattr(self, str(name))


def absent(package: str, name: str, caller: FrameType) -> Exception:
    """Return the error of a name that a package does not have; it says where, or what else is."""
    from difflib import get_close_matches

    own, root = vars(sys.modules[package]).get("__all__", []), sys.modules["kvpact"].__all__
    meant, hint = next((end for end in ("Press", "Config") if name.endswith(end)), name), ""
    if meant in _MEANT:
        hint = f"; write: {_MEANT[meant]}"
    elif place := "" if name.startswith("_") else _place_of(name):
        hint = f"; write: from {place} import {name}"
    elif near := get_close_matches(name, own, n=1) or get_close_matches(name, root, n=1):
        hint = f"; did you mean {near[0]!r}" + " of kvpact" * (near[0] not in own) + "?"
    elif own and not name.startswith("_"):
        hint = f"; it has {', '.join(own)}"
    # ``from package import name`` looks here first, and would drop an AttributeError's text.
    asked = caller.f_code.co_name == "_handle_fromlist"
    error = ImportError if asked and hint else AttributeError
    return error(f"module {package!r} has no attribute {name!r}{hint}")


def _place_of(name: str) -> str:
    """Return the package that has a name, or nothing."""
    if name in sys.modules["kvpact"].__all__:
        return "kvpact"
    with suppress(BackendUnavailable):  # the last one needs transformers
        places = (f"kvpact.{x}" for x in _PLACES.split())
        return next((x for x in places if callable(vars(import_module(x)).get(name))), "")
    return ""


class _Telling(ModuleType):
    """A package that imports what stands below it, and says where other names are."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            below = f"{self.__name__}.{name}"
            if not name.startswith("_") and find_spec(below) is not None:
                return import_module(below)
            raise absent(self.__name__, name, sys._getframe(1))


def let_tell(package: str, call: Callable[..., Any] | None = None) -> None:
    """Let a package say where names are that it does not have, and its calls be a function's."""
    kind: type = _Telling
    module = sys.modules[package]
    for name in vars(module).get("__all__", ()):
        setattr(module, name, told(vars(module)[name]))
    if call is not None:
        own, tells = inspect.signature(call), tells_call(call_line(package, call))(call)
        body = {"__call__": staticmethod(tells), "__signature__": property(lambda package: own)}
        kind = type("CallablePackage", (_Telling,), body)
    module.__class__ = kind


def told(found: Any) -> Any:
    """Return a function or class that says how it is called; what steps call is left alone."""
    if isinstance(found, classmethod | staticmethod):
        return type(found)(told(found.__func__))
    if isinstance(found, FunctionType):
        return found if hasattr(found, "told") else tells_call()(found)
    if isinstance(found, type) and not issubclass(found, BaseException):
        hot = found.__module__.split(".")[1] in _HOT or hasattr(found, "get_seq_length")
        owners = [x for x in found.__mro__ if re.match("kvpact.(?!contract)", x.__module__)]
        for owner, name in [(x, name) for x in owners for name in vars(x)]:
            if name in _COLD.split() if hot else name[0] != "_" or name == "__init__":
                setattr(owner, name, told(vars(owner)[name]))
        if not hot and not hasattr(found, "__getattr__"):
            found.__getattr__ = vars(Told)["__getattr__"]  # type: ignore[attr-defined]
    return found


def _name_of(function: Callable[..., Any], given: tuple[Any, ...]) -> str:
    """Return what is written to call a function, a method or a class."""
    place, _, name = function.__qualname__.rpartition(".")
    if given and name != "__init__" and "self" in inspect.signature(function).parameters:
        place = (re.findall("[A-Z][a-z]+", type(given[0]).__name__) or [place])[-1].lower()
    return f"{place or _place_of(name) or function.__module__}.{name}".removesuffix(".__init__")


class Figures(dict[str, Any]):
    """Figures by name; a name that is not there is answered with those that are."""

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"there is no {name!r}; there are {', '.join(self)}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no attribute {name!r}; figures are items: {', '.join(self)}")


class _Absent(NamedTuple):  # with a `__getattr__`, every attribute would be read more slowly
    name: str
    line: str

    def __get__(self, owner: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} has no {self.name!r}; write: {self.line}")


def tells_call(line: str = "") -> Callable[[F], F]:
    """Let a function say what to write where its arguments do not fit."""

    def changed(function: F) -> F:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return function(*given, **named)
            except TypeError:
                shown = line or call_line(_name_of(function, given), function)
                try:
                    inspect.signature(function).bind(*given, **named)
                except TypeError as error:
                    raise CallError(f"{shown.partition('(')[0]}: {error}; write: {shown}") from None
                raise  # from within

        call.told = True  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return changed


def tells_names(meant: Mapping[str, str], call: str = "") -> Callable[[type[T]], type[T]]:
    """Let a class say what to write for names, or arguments of a `call`, that it has not."""

    def changed(kind: type[T]) -> type[T]:
        if call:
            kind.__init__ = tells_call(call)(kind.__init__)  # type: ignore[method-assign]
            told(kind)
        for name, line in meant.items():
            setattr(kind, name, _Absent(name, line))
        kind.__dir__ = lambda self: {*object.__dir__(self)} - meant.keys()  # type: ignore[method-assign]
        return kind

    return changed
