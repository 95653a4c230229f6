"""Which attention a model uses while caches made for it are there."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from functools import lru_cache
from typing import Any

from transformers import PreTrainedConfig

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.attention import ATTENTION, register_attention
from kvpact.integrations.transformers.facts import modeling_module
from kvpact.integrations.transformers.fallback import say_once


class Loan:
    """Held by the caches for which a config's attention is ``kvpact``; what it was comes back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Loan:
        return self


class _Lent(str):
    """The attention's name while it is lent; copied or pickled, it is what stood there before."""

    __slots__ = ("before",)
    before: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.before is None else (str, (self.before,))


_loans: weakref.WeakValueDictionary[int, Loan] = weakref.WeakValueDictionary()
_before: dict[int, str | None] = {}
# A cache may be freed in one thread while another makes one for the same config, and the garbage
# collector frees some within these very functions.
_lock = threading.RLock()


def _lent(config: PreTrainedConfig) -> Loan:
    loan = _loans.get(id(config))
    if loan is None:
        loan = _loans[id(config)] = Loan()
        _before.setdefault(id(config), config._attn_implementation)
        weakref.finalize(loan, _give_back, config).atexit = False
    config._attn_implementation = name = _Lent(ATTENTION)
    name.before = _before[id(config)]
    return loan


def _give_back(config: PreTrainedConfig) -> None:
    with _lock:
        if id(config) in _loans:  # lent again before this was called
            return
        before = _before.pop(id(config), None)
        if config._attn_implementation == ATTENTION:
            config._attn_implementation = before


@lru_cache(maxsize=256)
def _asks_by_name(module: str) -> bool:
    """Whether a model's code compares the name of its attention instead of looking it up."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    return "._attn_implementation ==" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def choose_attention(config: PreTrainedConfig, attention: str, sparse: bool = False) -> Loan | None:
    """Register ``kvpact`` and make it the config's attention in place of ``sdpa``.

    The cache holds the `Loan` returned, at whose end the config is as before. None where it was
    left alone: for ``keep``, and for `sparse` layers, which ``sdpa`` and ``eager`` alone serve.
    """
    if attention not in ("auto", "keep"):
        raise SpecError(f"attention should be 'auto' or 'keep', not {attention!r}")
    register_attention()
    with _lock:
        return _chosen(config, attention, sparse)


def _chosen(config: PreTrainedConfig, attention: str, sparse: bool) -> Loan | None:
    lent = id(config) in _before  # asked first: a loan may end at any moment, but none begins
    current = config._attn_implementation
    by_name = _asks_by_name(modeling_module(config))
    if by_name and current == ATTENTION:
        raise KVPactError(
            "this model computes attention by itself and knows 'sdpa' by name; with 'kvpact' "
            "it would not be causal: load it with attention 'sdpa'"
        )
    if sparse and current == ATTENTION:
        raise KVPactError(
            "layers of this model choose the tokens they attend to, which 'kvpact' does not "
            "honour: call model.set_attn_implementation('sdpa')"
        )
    if attention == "keep":
        return None
    if sparse:
        say_once(
            "sparse",
            "layers of this model choose the tokens they attend to, which works with attention "
            f"{current!r} and not with 'kvpact': the compressed layers are read decompressed",
        )
    elif by_name:
        say_once(
            "decompressed",
            "this model computes attention by itself: K and V are decompressed for it in every "
            "step, which is right, but slower and with a whole layer in memory",
        )
    elif lent or current in ("sdpa", None):
        return _lent(config)
    elif current != ATTENTION:
        say_once(
            "decompressed",
            f"the model's attention is {current!r}, which will read decompressed K and V; "
            "model.set_attn_implementation('kvpact') attends over the compressed cache",
        )
    return None
