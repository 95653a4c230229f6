"""One layer's new tokens of many sequences of a paged cache: all of them, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from kvpact.cache.layer import CacheLayer, LayerPlan
from kvpact.contract import AttendConfig

if TYPE_CHECKING:
    from kvpact.cache.paged import PagedKVCache


class PagedStep:
    """Plans for one layer and many sequences, made on entry, undone (pages too) on an error."""

    def __init__(
        self,
        cache: PagedKVCache,
        layer: int,
        tokens: Mapping[int, tuple[Tensor, Tensor]],
        configs: Mapping[int, AttendConfig],
    ) -> None:
        self._cache, self._layer, self._tokens, self._configs = cache, layer, tokens, configs

    def __enter__(self) -> list[tuple[CacheLayer, LayerPlan]]:
        cache, layer = self._cache, self._layer
        for k, v in self._tokens.values():
            cache.check(layer, k, v)
        self._before = {seq: len(cache._sequence(seq).table) for seq in self._tokens}
        cache.reserve(list(self._tokens), [k.shape[2] for k, _ in self._tokens.values()], layer)
        self._lock = cache._layer_locks[layer]
        self._lock.acquire()
        try:
            plans = []
            for seq, (k, v) in self._tokens.items():
                entry = cache._sequence(seq).layers[layer]
                plans.append((entry, entry.prepare(k, v, self._configs.get(seq, AttendConfig()))))
            return plans
        except BaseException:
            self._undo()
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._undo()
        else:
            self._lock.release()

    def _undo(self) -> None:
        self._lock.release()
        with self._cache.pool.lock:
            for seq, pages in self._before.items():
                sequence = self._cache._sequence(seq)
                # Another layer may have got here in the meantime.
                used = -(-sequence.length // self._cache.pool.page_size)
                self._cache._trim(sequence, max(pages, used))
