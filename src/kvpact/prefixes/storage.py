"""Prefixes stored by another spec than the cache's: in fewer bits, and by codecs that are known."""

from __future__ import annotations

import torch

from kvpact.cache import ContiguousCache, recode
from kvpact.cache.codecs import Calibration, layer_codecs
from kvpact.cache.layer import CacheLayer
from kvpact.prefixes.sources import Codecs, PrefixSource
from kvpact.recipe import SpecLike, layer_specs
from kvpact.snapshot import Snapshot


class StoredSource:
    """A cache whose prefixes are stored by another spec (see `PrefixSource`).

    Tokens are decompressed and compressed again, when they are saved and when they are loaded.

    Parameters
    ----------
    source : PrefixSource
        The cache.
    spec : str, Spec, path or mapping
        What chunks are stored by.
    calibration : Calibration or mapping, optional
        For methods of `spec` that learn.
    """

    def __init__(
        self, source: PrefixSource, spec: SpecLike, calibration: Calibration | None
    ) -> None:
        self._source, self._calibration = source, calibration
        self.geometry, self.key_offsets = source.geometry, source.key_offsets
        self.specs = layer_specs(spec, len(source.specs))

    def codecs(self) -> Codecs:
        """Return the codecs that chunks are stored by."""
        return layer_codecs(self.specs, self.geometry, self._calibration, self.key_offsets)

    @torch.no_grad()
    def layers(self, seq: int | None) -> list[CacheLayer]:
        """Return what a sequence holds, as it is stored."""
        held = self._source.layers(seq)
        if not any(layer.length for layer in held):
            return held
        stored = ContiguousCache(
            self.specs,
            self.geometry,
            calibration=self._calibration,
            key_offsets=self.key_offsets,
        )
        for index, layer in enumerate(held):
            if layer.length:
                stored.store(index, layer.dequantize("k"), layer.dequantize("v"))
        return [stored.entry(index) for index in range(len(held))]

    def restore(self, snapshot: Snapshot, seq: int | None) -> None:
        """Hold what a snapshot of stored tokens holds, by the cache's own specs."""
        codecs, known = self._source.codecs(), None
        if codecs is not None:
            known = {i: (k.state(), v.state()) for i, (k, v) in enumerate(codecs)}
        own = recode(snapshot, self._source.specs, calibration=known, key_offsets=self.key_offsets)
        self._source.restore(own, seq)
