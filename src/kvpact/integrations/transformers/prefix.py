"""Prefixes of prompts for transformers' models: loaded from a store instead of computed again."""

import re
from collections.abc import Sequence
from copy import deepcopy
from inspect import signature
from typing import Any

import torch

from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.codecs import Calibration
from kvpact.errors import GeometryError, MismatchError, SnapshotError, SpecError
from kvpact.integrations.calibrations import learning
from kvpact.integrations.fingerprint import (
    model_fingerprint,
    require_adapter_name,
    weights_seen,
)
from kvpact.integrations.transformers.attention.learnt import calibration_of
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.held.calls import watch
from kvpact.integrations.transformers.layers.engine_layers import record_shapes
from kvpact.integrations.transformers.model.facts import ENTRIES, layer_facts
from kvpact.integrations.transformers.model.offsets import entries, rope_by_length
from kvpact.integrations.transformers.versions import named
from kvpact.integrations.weights import input_device, part_of
from kvpact.prefixes import PrefixCache, Tokens, token_ids
from kvpact.prefixes.fetch import first_lacking
from kvpact.prefixes.sources import Codecs
from kvpact.recipe import SpecLike, layer_specs
from kvpact.snapshot import RecordState
from kvpact.snapshot.state import CacheState
from kvpact.stores import Store

_MEDIA = re.compile(r"(image|video|audio|vision|speech).*_token_(id|index)")
"""Names in configs of the tokens in whose place an image, a video or sound stands."""
_FORGETFUL = {"falcon_mamba", "jamba", "zamba"}
"""Models whose states of linear attention count for single tokens alone (transformers 5.23)."""


class TextPrefixes(PrefixCache):
    """Prefixes that end before the first token of an image, a video or sound, which no id shows."""

    media: frozenset[int] = frozenset()
    model: Any
    cache: CompressedCache
    given: bool
    adapter: str | None
    seen: tuple[object, object]
    _ids: list[int] | None = None
    """The tokens in the cache, as far as this object knows; None while a call is under way."""

    def load(self, tokens: Tokens, *, seq: int | None = None) -> int:
        """See `PrefixCache.load`; weights that have changed since get a fingerprint of their own.

        Raises `MismatchError` where another adapter is active than before, or the weights changed
        and the fingerprint was given.
        """
        if not self.cache.get_seq_length():
            self._meet_weights()
        held = super().load(tokens, seq=seq)
        self._ids = token_ids(tokens)[:held]
        ids = torch.tensor(self._ids, dtype=torch.long, device="cpu")
        self.cache._shared.call_log.note(0, held, ids)
        return held

    def _meet_weights(self) -> None:
        """Go on with the weights as they are now."""
        seen = weights_seen(self.model)
        if seen[1] != self.seen[1] or (self.given and seen != self.seen):
            raise MismatchError(
                "the model's weights changed or moved, or another adapter is active, since "
                "prefix_cache() was made: make a new one, with the present fingerprint and adapter"
            )
        if seen != self.seen:
            name = model_fingerprint(self.model, adapter=self.adapter)
            self.rename(name + part_of(self.model))
            self.seen = seen

    def save(self, tokens: Tokens, *, seq: int | None = None) -> int:
        """See `PrefixCache.save`.

        Raises `GeometryError`, too, where the model was given other ids, or more than ids: a mask
        with holes, positions that don't count up from 0, embeddings. And `MismatchError` where
        weights or adapters are others than when the cache was empty.
        """
        if weights_seen(self.model) != self.seen:
            raise MismatchError(
                "the model's weights or adapters changed since the cache was empty: reset() it, "
                "and load() or prefill() before the model is called"
            )
        written = super().save(tokens, seq=seq)
        self._ids = token_ids(tokens)
        return written

    def keys(self, tokens: Tokens) -> list[str]:
        """Return the store's keys of all full chunks before the first image, video or sound."""
        ids = token_ids(tokens)
        return super().keys(ids[: self._text(ids)])

    def _text(self, ids: Sequence[int]) -> int:
        """Return how many ids stand before the first image, video or sound."""
        return next((i for i, token in enumerate(ids) if token in self.media), len(ids))

    def _check(self, layers: Sequence[CacheLayer], ids: Sequence[int]) -> None:
        super()._check(layers, ids)
        self.cache._shared.call_log.check(ids, self.cache.tokens(), self._text(ids))

    @torch.no_grad()
    def prefill(self, tokens: Tokens, *, every: int | None = None) -> int:
        """Load the longest known prefix of a prompt, compute the rest of its chunks, and save them.

        Windows and states of other layers than full attention's stand at one count of tokens: they
        are saved where the model stops. It stops at the prompt's last full chunk, and where a known
        prefix ends after which the prompt goes on otherwise; with `every`, more often.

        Parameters
        ----------
        tokens : sequence of int or Tensor
            The prompt's token ids, `[T]` or `[1, T]`. At least the last one is left to the model.
        every : int, optional
            Stop at its multiples, too; itself a multiple of `chunk`.

        Returns
        -------
        int
            Tokens that the cache holds now; `generate` computes the rest.

        Raises
        ------
        GeometryError
            `every` cuts a chunk, or the cache holds other tokens than the prompt's first, or such
            as this object has neither loaded nor saved.
        SnapshotError
            Layers hold unlike numbers of tokens since a call was interrupted.
        StoreError
            The store could not write; the cache holds what was computed, and can be used.

        Examples
        --------
        >>> prefixes.prefill(input_ids)
        >>> tokens = model.generate(input_ids, cache=cache)
        >>> prefixes.save(tokens)
        """
        ids = token_ids(tokens)
        if every is not None and (type(every) is not int or every < 1 or every % self.chunk):
            raise GeometryError(f"every should be a multiple of {self.chunk}, not {every!r}")
        keys = self.keys(ids[:-1])
        end = len(keys) * self.chunk
        if held := self._going_on(ids):
            known = first_lacking(keys, self._lack)
        else:
            held, known = self.load(ids[:-1]), self._known
        stops = {known * self.chunk, end, *range(0, end, every or max(end, 1))}
        for stop in sorted(stop for stop in stops if stop > held):
            self._compute(ids, held, stop)
            self.save(ids[:stop])
            held = stop
        return held

    def _going_on(self, ids: list[int]) -> int:
        """Return how many tokens the cache holds, which have to be the first of `ids`."""
        if not self.cache.get_seq_length():
            return 0
        held, known = self.cache.tokens(), self._ids
        if known is None or not held <= min(len(known), len(ids) - 1) or known[:held] != ids[:held]:
            raise GeometryError(
                f"the cache holds {held} tokens that were not loaded or saved here as the first of "
                "this prompt; reset it, or save() the whole text before"
            )
        return held

    def _compute(self, ids: list[int], first: int, last: int) -> None:
        """Let the model compute the tokens `first <= t < last`."""
        device = input_device(self.model)
        given = torch.tensor([ids[first:last]], dtype=torch.long, device=device)
        known = signature(self.model.forward).parameters
        more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        if "position_ids" in known:  # Bamba counts them from 0 otherwise
            positions = torch.arange(first, last, dtype=torch.long, device=device)
            more["position_ids"] = positions[None]
        self._ids = None
        self.model(input_ids=given, **named(self.cache), use_cache=True, **more)
        self._ids = ids[:last]


class _PrefixSource:
    """The one sequence of a `CompressedCache`, see `kvpact.prefixes.PrefixSource`."""

    def __init__(self, cache: CompressedCache, model: Any) -> None:
        if cache._shared.budget is not None:
            raise SpecError("a budget can't go with stored prefixes: leave one of them out")
        self._cache, self._device = cache, input_device(model)
        probe = _probed(cache, model)
        held = probe.held()
        assert held is not None
        self.shapes = record_shapes(probe.own_by_index())
        self.geometry, self.specs = held.geometry, held.specs
        self.key_offsets = held.key_offsets
        self._codecs = [held.entry(i).codecs for i in range(len(self.specs))]

    def codecs(self) -> Codecs | None:
        """Return the codecs of a calibration; others do not exist before the first tokens."""
        found = [pair for pair in self._codecs if pair is not None]
        return found if len(found) == len(self._codecs) else None

    def layers(self, seq: int | None) -> list[CacheLayer]:
        held = self._cache.held()
        if self._cache._shared.gaps.ranges:
            raise SnapshotError("the cache has dropped tokens: it holds no prefix; reset() it")
        return [] if held is None else [held.entry(i) for i in range(len(self.specs))]

    def records(self, seq: int | None) -> list[RecordState]:
        return self._cache.records(whole=True)

    def restore(self, held: CacheState, seq: int | None) -> None:
        self._cache.restore_state(held, self._device)


@torch.no_grad()
def _probed(cache: CompressedCache, model: Any) -> CompressedCache:
    """Return the cache, or one of a token: shape and dtype of K and V only the model knows."""
    if cache.held() is not None:
        return cache
    probe = deepcopy(cache)
    model(torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), **named(probe))
    return probe


def prefix_cache(
    store: Store,
    model: Any,
    cache: CompressedCache,
    *,
    fingerprint: str | None = None,
    adapter: str | None = None,
    tenant: str | None = None,
    chunk: int | None = None,
    storage: SpecLike | None = None,
    calibration: Calibration | None = None,
    windows: str | None = None,
) -> TextPrefixes:
    """Return the `PrefixCache` of a transformers model, which can `prefill`, too.

    Prefixes end before the first image, video or sound: what it shows is not in the token ids.
    Layers that transformers caches itself (sliding, linear, …) are stored with them.

    Parameters
    ----------
    store : Store
        See `kvpact.stores.open_store`.
    model : PreTrainedModel
        The model; one token goes through it, to learn the shape of its K and V.
    cache : CompressedCache
        Of this model, for one row.
    fingerprint : str, optional
        What `model_fingerprint(model)` gave. If omitted it is computed, which reads every weight
        (about a second per gigabyte), now and whenever `load` finds that they have changed; keep
        it where many caches serve one model, and compute it again when the weights change. Where
        heads are on several processes (tensor parallelism), rank and number of processes are added.
    adapter, tenant, chunk, storage, calibration, windows : optional
        As in `PrefixCache`. Methods that learn from tokens, and have learnt nothing yet, are given
        what `calibration_of` returns. Adapters that are merged are in the fingerprint already;
        where others are loaded, `adapter` has to say which one is active, and how strongly.

    Raises
    ------
    SnapshotError
        The model has RoPE whose frequencies depend on the text's length (``dynamic``,
        ``longrope``), or computes several tokens without the state before them (Jamba).
    MismatchError
        The model has adapters that are not merged, and `adapter` is missing; or its weights can't
        be read, and `fingerprint` is missing.
    SpecError
        The spec's method learns from tokens, and the cache holds some already, or the model's
        tokenizer is not known (see `calibration_of`).

    Examples
    --------
    >>> cache = CompressedCache(model)
    >>> prefixes = prefix_cache(store, model, cache)
    >>> prefixes.prefill(input_ids)
    >>> tokens = model.generate(input_ids, cache=cache)
    >>> prefixes.save(tokens)
    """
    require_adapter_name(model, adapter)
    config = model.config.to_dict()
    if kind := rope_by_length(config):
        raise SnapshotError(
            f"RoPE of type {kind!r} turns equal tokens otherwise in longer texts: prefixes of "
            "this model can't be shared; a snapshot of the whole cache can be taken"
        )
    decoder = model.config.get_text_config(decoder=True)
    if decoder.model_type in _FORGETFUL:
        raise SnapshotError(
            f"{decoder.model_type} computes several tokens as if none were before them, so what "
            "follows a prefix would be wrong; a snapshot of the whole cache can be taken"
        )
    if not ENTRIES.isdisjoint(layer_facts(decoder).types):
        raise SnapshotError(
            f"{decoder.model_type} makes entries of several tokens each, which are no chunks of a "
            "prefix; a snapshot of the whole cache can be taken"
        )
    seen, compressed = weights_seen(model), layer_facts(decoder).compressed()
    name = fingerprint or model_fingerprint(model, adapter=adapter)
    specs = cache._shared.specs if storage is None else layer_specs(storage, len(compressed))
    known = calibration if storage is not None else cache._shared.calibration
    if known is None and learning(specs) and not (storage is None and cache.get_seq_length()):
        known = calibration_of(model, specs, store=store, fingerprint=name, adapter=adapter)
        known = known.select(compressed)
        if storage is None:
            cache._shared.calibration = known.needed(specs).to(input_device(model))
        else:
            calibration = known
    prefixes = TextPrefixes(
        store,
        _PrefixSource(cache, model),
        model=name + part_of(model),
        adapter=adapter,
        tenant=tenant,
        chunk=chunk,
        storage=storage,
        calibration=calibration,
        windows=windows,
    )
    prefixes.model, prefixes.cache = model, cache
    prefixes.given, prefixes.adapter, prefixes.seen = bool(fingerprint), adapter, seen
    prefixes.media = frozenset(
        value for name, value in entries(config) if _MEDIA.fullmatch(name) and type(value) is int
    )
    log, held = cache._shared.call_log, cache.get_seq_length()
    log.note(log.seen, max(held - log.seen, 0))  # what came before is taken for text
    watch(model, bool(prefixes.media))
    return prefixes
