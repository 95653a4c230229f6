"""One layer's new tokens of many sequences of a paged cache: all of them, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from kvpact.cache.layer import CacheLayer, LayerPlan
from kvpact.cache.sequences import PagedSequence
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
        checked: bool = False,
    ) -> None:
        self._cache, self._layer, self._tokens, self._configs = cache, layer, tokens, configs
        self._checked = checked

    def __enter__(self) -> list[tuple[CacheLayer, LayerPlan]]:
        cache, layer = self._cache, self._layer
        for k, v in () if self._checked else self._tokens.values():
            cache.check(layer, k, v)
        counts = [k.shape[2] for k, _ in self._tokens.values()]
        # Two steps of one layer go one after the other, from the count of their pages on.
        self._lock = cache._layer_locks[layer]
        self._lock.acquire()
        self._before: dict[int, int] = {}
        try:
            with cache.pool.lock:
                before = {seq: len(cache._sequence(seq).table) for seq in self._tokens}
                cache.reserve(list(self._tokens), counts, layer)
                self._before = before
                for seq, count in zip(self._tokens, counts, strict=True):
                    sequence = cache._sequence(seq)
                    sequence.coming[layer] = sequence.layers[layer].length + count
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
            self._arrived()
            self._lock.release()

    def _arrived(self) -> list[tuple[PagedSequence, int]]:
        """Take the step's tokens off what is on its way; return its sequences, if not freed."""
        cache = self._cache
        with cache.pool.lock:
            known = [
                (cache._sequences[seq], pages)
                for seq, pages in self._before.items()
                if seq in cache._sequences
            ]
            for sequence, _ in known:
                sequence.coming.pop(self._layer, None)
        return known

    def _undo(self) -> None:
        cache = self._cache
        with cache.pool.lock:
            for sequence, pages in self._arrived():
                # Other layers may have got here in the meantime, or be on their way.
                used = max([sequence.length, *sequence.coming.values()])
                cache._trim(sequence, max(pages, -(-used // cache.pool.page_size)))
        self._lock.release()
