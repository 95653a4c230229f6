"""The interface that a `PrefixCache` needs of a cache, and the adapters of kvpact's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, PagedKVCache, PagedView, cache_specs
from kvpact.cache.budget.cache import BudgetCache
from kvpact.cache.checks import KeyOffsets
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import layer_state
from kvpact.cache.paged.sequences import PagedSequences
from kvpact.cache.recode import layers_of, recoded
from kvpact.cache.stream.codecs import Calibration, layer_codecs
from kvpact.errors import DtypeError, GeometryError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.methods import Codec
from kvpact.prefixes.checkpoints import RecordShape
from kvpact.recipe import SpecLike
from kvpact.snapshot import RecordState
from kvpact.snapshot.state import CacheState
from kvpact.spec import Spec

Codecs = list[tuple[Codec, Codec]]


class PrefixSource(Protocol):
    """A cache whose sequences have prefixes. `seq` names one, where there are several."""

    @property
    def specs(self) -> list[Spec]:
        """The spec of each layer."""
        ...

    @property
    def geometry(self) -> CacheGeometry:
        """Shape of K and V, with the dtype."""
        ...

    @property
    def key_offsets(self) -> KeyOffsets:
        """Layer -> `KeyOffset`; empty where there are none."""
        ...

    def codecs(self) -> Codecs | None:
        """Return the codecs of each layer where they exist before any token."""
        ...

    def layers(self, seq: int | None) -> list[CacheLayer]:
        """Return what a sequence holds, layer by layer; nothing while it holds nothing."""
        ...

    def restore(self, held: CacheState, seq: int | None) -> None:
        """Restore a state, whose layers are there once."""
        ...


@runtime_checkable
class RecordSource(Protocol):
    """A `PrefixSource` of a model whose other layers hold windows and states, at one count."""

    shapes: Sequence[RecordShape]

    def records(self, seq: int | None) -> list[RecordState]:
        """Return copies of what these layers hold. Raises `SnapshotError` after an interrupt."""
        ...


class _Contiguous:
    """The one row of a `ContiguousCache`."""

    def __init__(self, cache: ContiguousCache, device: torch.device | str) -> None:
        if cache.geometry.dtype is None:
            raise DtypeError("make the cache with a geometry that has a dtype: keys depend on it")
        if isinstance(cache, BudgetCache):
            raise SpecError("a budget can't go with stored prefixes: leave one of them out")
        self._cache, self._device = cache, device
        self.specs, self.geometry = cache.specs, cache.geometry
        self.key_offsets: KeyOffsets = cache.key_offsets

    def codecs(self) -> Codecs | None:
        pairs = [self._cache.entry(i).codecs for i in range(len(self.specs))]
        found = [pair for pair in pairs if pair is not None]
        return found if len(found) == len(pairs) else None

    def layers(self, seq: int | None) -> list[CacheLayer]:
        _no_seq(seq)
        return [self._cache.entry(i) for i in range(len(self.specs))]

    def restore(self, held: CacheState, seq: int | None) -> None:
        _no_seq(seq)
        self._cache.restore_state(held, self._device)


class _Paged:
    """The sequences of a `PagedKVCache`."""

    def __init__(self, cache: PagedSequences) -> None:
        self._cache = cache
        self.specs, self.geometry = cache.specs, cache.token_geometry
        self.key_offsets: KeyOffsets = cache.key_offsets

    def codecs(self) -> Codecs | None:
        return list(self._cache.pool.codecs)

    def layers(self, seq: int | None) -> list[CacheLayer]:
        if seq is None:
            raise GeometryError("say which sequence: seq=")
        return [self._cache.layer_of(seq, i) for i in range(len(self.specs))]

    def restore(self, held: CacheState, seq: int | None) -> None:
        self._cache.restore_state(held, [0], None if seq is None else [seq])


class _View(_Paged):
    """The one row of a `PagedView`."""

    def __init__(self, view: PagedView) -> None:
        super().__init__(view.cache)
        self._view = view

    def layers(self, seq: int | None) -> list[CacheLayer]:
        _no_seq(seq)
        seqs = self._view.seqs or []
        if len(seqs) > 1:
            raise GeometryError(f"the view has {len(seqs)} sequences; name one of the cache's own")
        return super().layers(seqs[0]) if seqs else []

    def restore(self, held: CacheState, seq: int | None) -> None:
        self._view.restore_state(held)


def _no_seq(seq: int | None) -> None:
    if seq is not None:
        raise GeometryError("this cache has one sequence; leave seq out")


def source_of(
    cache: ContiguousCache | PagedKVCache | PagedView | PrefixSource, device: torch.device | str
) -> PrefixSource:
    """Return the `PrefixSource` of a cache; a `PrefixSource` is returned as it is."""
    if isinstance(cache, ContiguousCache):
        return _Contiguous(cache, device)
    if isinstance(cache, PagedKVCache):
        return _Paged(cache)
    return _View(cache) if isinstance(cache, PagedView) else cache


class StoredSource:
    """A cache whose prefixes are compressed again, by another spec (see `PrefixSource`)."""

    def __init__(
        self, source: PrefixSource, spec: SpecLike, calibration: Calibration | None
    ) -> None:
        self._source, self._calibration = source, calibration
        self.geometry, self.key_offsets = source.geometry, source.key_offsets
        self.specs = cache_specs(spec, source.geometry)

    def codecs(self) -> Codecs:
        """Return the codecs that chunks are stored by."""
        return layer_codecs(self.specs, self.geometry, self._calibration, self.key_offsets)

    @torch.no_grad()
    def layers(self, seq: int | None) -> list[CacheLayer]:
        """Return what a sequence holds, as it is stored."""
        held = self._source.layers(seq)
        if not any(layer.length for layer in held):
            return held
        streams = [stream for layer in held for stream in layer.streams()]
        if any(x.offset and x.offset.origin is not None for x in streams):
            raise GeometryError("prefixes begin at position 0; this cache's tokens begin elsewhere")
        shared = self.geometry, self._calibration, self.key_offsets, streams[0].tail.device
        stored = recoded(held, self.specs, *shared)
        return [stored.entry(index) for index in range(len(held))]

    def restore(self, held: CacheState, seq: int | None) -> None:
        """Restore a state of stored tokens, by the cache's own specs."""
        codecs, known = self._source.codecs(), None
        if codecs is not None:
            known = {i: (_on_cpu(k), _on_cpu(v)) for i, (k, v) in enumerate(codecs)}
        stored, specs = layers_of(held, "cpu"), self._source.specs
        made = recoded(stored, specs, held.geometry, known, self.key_offsets, "cpu")
        layers = (layer_state(made.entry(index)) for index in range(len(made.specs)))
        self._source.restore(held._replace(layers=layers), seq)


def _on_cpu(codec: Codec) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in codec.state().items()}
