"""First tokens of a layer that wait, exact, from call to call before they are stored."""

from __future__ import annotations

import threading
from collections import deque
from itertools import starmap
from typing import Any
from weakref import proxy, ref

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.cache.layer.wait import Wait
from kvpact.integrations.transformers.held.shared import BatchCache, SharedState

DENSE = torch.contiguous_format
_read = threading.local()
"""`last`: the tokens that this thread's last `update` gave to a model as they are."""


def read_before_stored(k: Tensor) -> Any:
    """Return the `NewTokens` that `k` is of, or was just made of, where they are not stored yet."""
    last: ref[WaitingTokens] | None = getattr(_read, "last", None)
    if last is None:
        return None
    _read.last, tokens = None, last()
    if tokens is None or (tokens.k if tokens.expanded is None else tokens.expanded()) is not k:
        return None
    return tokens if tokens.fresh else None


class WaitingTokens:
    """The tokens of one `update` until something uses them: the first half of `NewTokens`.

    They are *unused* until attention, decompression or the layer's next call stores them. A
    cache's first tokens may be *whole*: they wait, growing with each call, until `Wait` ends. Both
    are *fresh* where the model reads them as they are.
    """

    # Made in every layer of every step: with slots it takes less time.
    __slots__ = (
        *("__weakref__", "_again", "_cache", "_layer", "_wait"),
        *("expanded", "k", "shared", "total", "v"),
    )
    shared: SharedState
    k: Tensor
    v: Tensor
    total: int
    expanded: ref[Tensor] | None
    _layer: int
    _cache: BatchCache
    _again: bool
    _wait: Wait | None

    @property
    def _unused(self) -> bool:
        """True while nothing has used these tokens."""
        return self.shared.waiting[self._layer] is self

    @property
    def whole(self) -> bool:
        """True if these are all tokens of an exact layer, which wait as they are."""
        return self._wait is not None

    @property
    def fresh(self) -> bool:
        """True if these are a cache's first tokens, not yet stored: read as they are."""
        if self._wait is not None:
            return self._unused
        first, latent = self.total == self.k.shape[2], self._cache.geometry.latent
        return latent and self.shared.exact_new and first and self._unused

    @property
    def _is_last(self) -> bool:
        """True if these are the last layer's: NaN of a layer before comes as far."""
        return self._layer + 1 == len(self.shared.waiting)

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on, which were not stored."""
        if self._wait is None or not length:
            self.shared.waiting[self._layer] = None
        elif length < self.total:
            self._hold(self.k[:, :, :length].clone(), self.v[:, :, :length].clone())

    def _hold(self, k: Tensor, v: Tensor) -> None:
        """Hold other tokens, all at once: in one call of C no interrupt is delivered."""
        news = (("k", k), ("v", v), ("total", k.shape[2]))
        deque(starmap(setattr, [(self, *new) for new in news]), maxlen=0)

    def wait_whole(self, k: Tensor, v: Tensor) -> bool:
        """Let a cache's first tokens wait, and be read, as they are; False where they can't."""
        shared, cache = self.shared, self._cache
        if not shared.may_wait or not isinstance(cache, ContiguousCache):
            return False
        if self._again or cache.geometry.latent or not shared.exact_new or shared.key_offsets:
            return False
        if not k.dtype is v.dtype is cache.geometry.dtype or k.is_meta or type(k) is not Tensor:
            return False
        wait = shared.wait_of(cache, self._layer, k, v)
        if not wait.holds(0, k, v) or (self._is_last and not wait.fits(k, v)):
            return False
        # Copies, since a view would keep more memory alive.
        self.k, self.v = k.clone(memory_format=DENSE), v.clone(memory_format=DENSE)
        # These stay from call to call: a cycle would keep them until garbage is collected.
        self.shared, self._wait = proxy(shared), wait
        _read.last = ref(self)
        return True

    def grow(self, k: Tensor, v: Tensor) -> bool:
        """Append the tokens of another call to those that wait; False where they can't wait."""
        wait = self._wait
        if wait is None or not wait.holds(self.total, k, v):
            return False
        if self._is_last and not wait.fits(k, v):
            return False
        try:
            both = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        except RuntimeError:  # of other shapes: what stores them says so
            return False
        self._hold(*both)
        _read.last = ref(self)
        return True

    def fits(self, held: int) -> bool:
        """Return whether the tokens after the first `held` can surely be stored later."""
        wait = self._wait
        return wait is None or wait.fits(self.k[:, :, held:], self.v[:, :, held:])

    def wait_again(self) -> None:
        """Let tokens wait that waited whole and were stored just now."""
        assert isinstance(self._cache, ContiguousCache)
        self._cache.reset(self._layer)
        self.shared.waiting[self._layer] = self

    def read_as(self, k: Tensor) -> None:
        """Note that attention is about to read `k`, which was made of these tokens."""
        _read.last, self.expanded = ref(self), ref(k)
