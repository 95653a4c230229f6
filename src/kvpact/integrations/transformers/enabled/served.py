"""Figures of the calls that an enabled model serves, and a warning about others."""

from __future__ import annotations

import sys
import threading
from typing import Any
from weakref import finalize

import torch
from torch import nn
from transformers import Cache

from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.model.fallback import warn
from kvpact.integrations.transformers.versions import CACHE, given_cache
from kvpact.kernels import Compute


class ServedCalls:
    """Figures of the caches made for a model; a cache's are added when it is freed."""

    def __init__(self) -> None:
        # A cache may be freed by the garbage collector within these very functions.
        self._lock = threading.RLock()
        self._calls = self._tokens = self._most = self._exact = 0
        self._backends: set[str] = set()
        self._fallbacks: dict[str, str] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedCalls:
        return ServedCalls()

    def begin(self) -> None:
        """Count a call of `generate`, or a request of a batch."""
        with self._lock:
            self._calls += 1

    def watch(self, cache: CompressedCache) -> None:
        """Count a call, and in the end what its cache held."""
        self.begin()
        held = object.__new__(type(cache))
        held.__dict__ = cache.__dict__
        finalize(cache, self._add, held).atexit = False

    def _add(self, cache: CompressedCache) -> None:
        found, compute = cache._summary(), cache._shared.compute
        tokens = found.rows * found.tokens
        self.add(tokens, found.nbytes, found.exact, compute if tokens else None)

    def add(self, tokens: int, nbytes: int, exact: int, compute: Compute | None) -> None:
        """Add the tokens of a call that is over, and its bytes, held and in an exact cache."""
        with self._lock:
            self._tokens += tokens
            if nbytes > self._most:
                self._most, self._exact = nbytes, exact
            if compute is not None:
                self._backends.update(compute.name.split(", "))
                self._fallbacks |= compute.stats()["reasons"]

    def stats(self) -> dict[str, Any]:
        """Return the figures; see `Enabled.stats`."""
        with self._lock:
            return {
                "calls": self._calls,
                "tokens": self._tokens,
                "most_bytes": self._most,
                "exact_bytes": self._exact,
                "backends": sorted(self._backends),
                "fallbacks": dict(self._fallbacks),
            }


def watch_no_calls(state: dict[str, Any]) -> None:
    """Remove `tell_of_exact` from a module's own attributes, in place: handles refer to them."""
    hooks = state["_forward_pre_hooks"]
    for key in [key for key, hook in hooks.items() if hook is tell_of_exact]:
        del hooks[key], state["_forward_pre_hooks_with_kwargs"][key]


def tell_of_exact(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn where a call reads exact K and V, once for a model."""
    if given_cache(kwargs) is not None or torch.compiler.is_compiling() or model.training:
        return
    if kwargs.get("use_cache") is False or any(isinstance(x, Cache) for x in args):
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate":  # which says itself what it does not serve
            return
        frame = frame.f_back
    watch_no_calls(vars(model))
    warn(
        "a model that is enabled has compressed caches in `generate`; this call was given none, "
        f"and its logits are those of an exact cache: pass {CACHE}=CompressedCache(model, spec, "
        "exact_new=False) to score as decoding reads, or use_cache=False if exact is right"
    )
