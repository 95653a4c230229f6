"""Eviction and snapshots of a model's cache: `CompressedCache.evict`, `compact`, `snapshot`.

What is left keeps the positions it was computed with, and the next token takes the position that it
would have had. So the cache goes on to count the tokens that are gone: as `Gaps` in what is held.
"""

from sys import _getframe
from typing import Any

from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.callable_package import tells_call
from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.geometry import check_count
from kvpact.integrations.transformers.engine_cache import TransformersCache
from kvpact.integrations.transformers.held.gaps import Gaps
from kvpact.integrations.transformers.layers.engine_layers import saved, tokens_held
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.snapshot import Identity, RecordState, Snapshot


class Evicting(TransformersCache):
    """The tokens of a model's layers, with `evict` and `compact`: positions stay as they are."""

    def _take(self, given: bool) -> None:
        """Let `generate` note, once a call, that it was given this cache; or refuse the call."""
        config = _getframe(1).f_locals.get("generation_config")
        if getattr(config, "use_cache", None) is False:
            line = "generate(..., use_cache=True, cache=cache), or without a cache"
            raise KVPactError(f"use_cache=False would store all text at each step; write: {line}")
        self._given = given

    _is_user_defined = property(lambda self: vars(self).get("_given", False), _take)

    def evict(self, begin: int, end: int) -> None:
        """Forget the tokens at the positions ``begin <= t < end``, in all rows and layers.

        For agents that drop the output of a tool. Memory is free in the same call. What was
        computed of these tokens in later ones stays; later tokens keep their positions, and
        `get_seq_length` goes on to count all. Packed tokens after the gap are packed a second
        time. `crop` may go back after and before the gap; snapshots have it, too. If anything
        is raised, the cache is as before.

        Parameters
        ----------
        begin, end : int
            ``0 <= begin <= end <= get_seq_length()``; tokens that are gone already may be among
            them.

        Raises
        ------
        GeometryError
            Not such a range; a layer with sliding attention still sees some of the tokens; rows
            are padded on the left; what `compact` left is touched.
        KVPactError
            A layer holds something that can't forget: a state, the keys of an index; another
            attention than kvpact's reads the cache.
        """
        check_count("begin", begin)
        check_count("end", end)
        whole, length = self._whole_cache(), self.get_seq_length()
        if not begin <= end <= length:
            raise GeometryError(f"positions {begin} to {end} of {length} can't be evicted")
        for index, layer in enumerate(self.layers):
            window = getattr(layer, "sliding_window", None)
            if window is not None and begin < end and end > length - window + 1:
                raise GeometryError(
                    f"layer {index} slides, and still sees tokens from {length - window + 1} on: "
                    "evict tokens before that, or later"
                )
            if window is None and type(layer) is not CompressedLayer:
                raise KVPactError(
                    f"layer {index}, a {type(layer).__name__}, can't forget tokens in the middle: "
                    "begin again with reset()"
                )
        gaps = self._shared.gaps
        if begin < gaps.firm:
            raise GeometryError(f"compact() left no places before {gaps.firm} to evict")
        if whole is not None and begin < end:
            also = self._shared.opening(gaps.opened(begin, end))
            whole.let_go(gaps.held(begin), gaps.held(end), also)
            self._order.forget()

    def compact(self, keep: Tensor) -> None:
        """Keep some of the tokens held alone, in each compressed layer and head of its own choice.

        What is said at `evict` holds here; layers that transformers caches itself stay as they
        are. Scores by which to choose come from outside: see `pressed`.

        Parameters
        ----------
        keep : Tensor
            Integers, ascending along the last axis, that count the tokens held now: `[n]`, or
            `[compressed layers, B, H_kv, n]`.

        Raises
        ------
        GeometryError, KVPactError
            Not such a tensor, or as `evict`.
        """
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer) and type(layer) is not CompressedLayer:
                raise KVPactError(
                    f"layer {index}, a {type(layer).__name__}, can't forget tokens in the middle"
                )
        whole, length = self._whole_cache(), self.get_seq_length()
        if whole is None:
            raise GeometryError("the cache is empty; run the model first")
        left = keep.shape[-1] if isinstance(keep, Tensor) and keep.dim() else 0
        also = self._shared.opening(Gaps(((0, length - left),), length))
        whole.let_go_but(keep, also if left < whole.seq_len() else ())
        self._order.forget()

    def _whole_cache(self) -> ContiguousCache | None:
        """Return the cache of the compressed layers, from which tokens may be evicted."""
        self._shared.gaps.check(self._shared.config._attn_implementation)
        self.tokens()
        return self.held()

    def tokens(self) -> int:
        """Return how many tokens all layers hold.

        Raises
        ------
        SnapshotError
            They hold unlike numbers, since a call was interrupted. (Layers with nothing but a state
            count none.)
        """
        counts = {x.get_seq_length() for x in self.layers if isinstance(x, CompressedLayer)}
        return tokens_held(self.own_by_index(), counts)

    def own_by_index(self) -> dict[int, Any]:
        """Return the layers that hold something of their own, by their number."""
        return {i: x for i, x in enumerate(self.layers) if type(x) is not CompressedLayer}

    def held(self) -> ContiguousCache | None:
        """Return the cache of all compressed layers, every token stored; None while one is empty.

        What layers hold that transformers caches itself is not in it, but in `records`.

        Raises
        ------
        GeometryError
            Layers have K and V of unlike shapes.
        """
        caches = self._caches()
        if None in self._shared.held:
            return None
        if len(caches) > 1:
            raise GeometryError(f"layers have K and V of {len(caches)} unlike shapes or dtypes")
        return caches[0]

    def _caches(self) -> list[ContiguousCache]:
        return [x for x in self._shared.stored() if isinstance(x, ContiguousCache)]

    @tells_call("cache.snapshot(token_ids=..., identity=...); cache.save has force=True, too")
    def snapshot(
        self, *, token_ids: Tensor | None = None, identity: Identity | None = None
    ) -> Snapshot:
        """Return what all layers hold (see `ContiguousCache.snapshot`).

        Layers that transformers caches itself are in it, too, with their windows and states, bit
        for bit.

        Raises
        ------
        SnapshotError
            Nothing is held yet, or layers hold unlike numbers of tokens since a call was
            interrupted.
        GeometryError
            Layers have K and V of unlike shapes.
        KVPactError
            A layer holds something that kvpact does not know.
        """
        held = self.held()
        if held is None:
            raise SnapshotError("the cache is empty; run the model first")
        return held.snapshot_with(self.records(), token_ids, identity)

    def records(self, *, whole: bool = False) -> list[RecordState]:
        """Return copies of what layers hold besides compressed K and V, for a snapshot.

        Parameters
        ----------
        whole : bool
            Packed streams, the keys of an index, decompressed instead of as they lie.

        Raises
        ------
        SnapshotError
            Layers hold unlike numbers of tokens since a call was interrupted.
        """
        tokens = self.tokens()
        found = saved(self.own_by_index(), tokens, whole=whole)
        odd = self._shared.call_log.odd(tokens)
        return found + self._shared.gaps.record(self._caches(), tokens, odd)
