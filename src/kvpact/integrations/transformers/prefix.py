"""Prefixes of prompts for transformers' models: what was computed once is loaded, not computed."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch

from kvpact.cache import ContiguousCache
from kvpact.cache.codecs import Calibration
from kvpact.cache.layer import CacheLayer
from kvpact.errors import SnapshotError
from kvpact.integrations.fingerprint import model_fingerprint, require_adapter_name
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.offsets import entries, rope_by_length
from kvpact.prefixes import PrefixCache, Tokens, token_ids
from kvpact.prefixes.sources import Codecs
from kvpact.recipe import SpecLike
from kvpact.snapshot import Snapshot
from kvpact.stores import Store

_MEDIA = re.compile(r"(image|video|audio|vision|speech).*_token_(id|index)")
"""Names in configs of the tokens in whose place an image, a video or sound stands."""


class _TextPrefixes(PrefixCache):
    """Prefixes that end before the first token of an image, a video or sound.

    What those show is in no token id: equal ids may stand for other K and V.
    """

    media: frozenset[int] = frozenset()

    def keys(self, tokens: Tokens) -> list[str]:
        ids = token_ids(tokens)
        first = next((i for i, token in enumerate(ids) if token in self.media), len(ids))
        return super().keys(ids[:first])


class _PrefixSource:
    """The one sequence of a `CompressedCache`, see `kvpact.prefixes.PrefixSource`."""

    def __init__(self, cache: CompressedCache, model: Any) -> None:
        self._cache, self._device = cache, model.device
        held = cache.held() or _probed(cache, model)
        self.geometry, self.specs = held.geometry, held.specs
        self.key_offsets = held.key_offsets
        self._codecs = [held.entry(i).codecs for i in range(len(self.specs))]

    def codecs(self) -> Codecs | None:
        """Return the codecs of a calibration; others do not exist before the first tokens."""
        found = [pair for pair in self._codecs if pair is not None]
        return found if len(found) == len(self._codecs) else None

    def layers(self, seq: int | None) -> list[CacheLayer]:
        held = self._cache.held()
        return [] if held is None else [held.entry(i) for i in range(len(self.specs))]

    def restore(self, snapshot: Snapshot, seq: int | None) -> None:
        self._cache.restore(snapshot, device=self._device)


@torch.no_grad()
def _probed(cache: CompressedCache, model: Any) -> ContiguousCache:
    """Return a cache of one token: what shape and dtype K and V have, only the model knows."""
    probe = deepcopy(cache)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=probe)
    held = probe.held()
    assert held is not None
    return held


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
) -> PrefixCache:
    """Return the `PrefixCache` of a transformers model.

    Prefixes end before the first image, video or sound: what it shows is not in the token ids.

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
        (about a second per gigabyte); keep it where many caches serve one model, and compute it
        anew when the weights change.
    adapter, tenant, chunk, storage, calibration : optional
        As in `PrefixCache`. Adapters that are merged are in the fingerprint already; where others
        are loaded, `adapter` has to say which one is active, and how strongly.

    Raises
    ------
    SnapshotError
        The model has layers that transformers caches itself (sliding, linear, …), or RoPE whose
        frequencies depend on the text's length (``dynamic``, ``longrope``).
    MismatchError
        The model has adapters that are not merged, and `adapter` is missing.
    SpecError
        The spec's method learns from tokens, so that prefixes can't be shared.

    Examples
    --------
    >>> cache = CompressedCache(model, "turboquant:bits=4")
    >>> prefixes = prefix_cache(store, model, cache)
    >>> prefixes.load(input_ids[:, :-1])
    >>> tokens = model.generate(input_ids, past_key_values=cache)
    >>> prefixes.save(tokens)
    """
    require_adapter_name(model, adapter)
    config = model.config.to_dict()
    if kind := rope_by_length(config):
        raise SnapshotError(
            f"RoPE of type {kind!r} turns equal tokens otherwise in longer texts: prefixes of "
            "this model can't be shared; a snapshot of the whole cache can be taken"
        )
    prefixes = _TextPrefixes(
        store,
        _PrefixSource(cache, model),
        model=fingerprint or model_fingerprint(model, adapter=adapter),
        adapter=adapter,
        tenant=tenant,
        chunk=chunk,
        storage=storage,
        calibration=calibration,
    )
    prefixes.media = frozenset(
        value for name, value in entries(config) if _MEDIA.fullmatch(name) and type(value) is int
    )
    return prefixes
