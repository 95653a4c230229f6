"""Prefixes stored by another spec than the cache's: in fewer bits, and by codecs that are known."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, cache_specs, recode
from kvpact.cache.codecs import Calibration, layer_codecs, states_of
from kvpact.cache.layer import CacheLayer
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.methods import Codec
from kvpact.prefixes.sources import Codecs, PrefixSource
from kvpact.recipe import SpecLike
from kvpact.snapshot import Snapshot


class StoredSource:
    """A cache whose prefixes are stored by another spec (see `PrefixSource`).

    Tokens are decompressed and compressed again, when they are saved and when they are loaded.

    `spec`: what chunks are stored by; `calibration`: for methods of `spec` that learn.
    """

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
        known = states_of(self._calibration, self.specs, self.geometry, streams[0].tail.device)
        stored = ContiguousCache(
            self.specs, self.geometry, calibration=known, key_offsets=self.key_offsets
        )
        for index, layer in enumerate(held):
            if layer.length:
                config = AttendConfig(padding=layer.padding)
                stored.store(index, layer.dequantize("k"), layer.dequantize("v"), config)
        return [stored.entry(index) for index in range(len(held))]

    def restore(self, snapshot: Snapshot, seq: int | None) -> None:
        """Hold what a snapshot of stored tokens holds, by the cache's own specs."""
        codecs, known = self._source.codecs(), None
        if codecs is not None:
            known = {i: (_on_cpu(k), _on_cpu(v)) for i, (k, v) in enumerate(codecs)}
        own = recode(snapshot, self._source.specs, calibration=known, key_offsets=self.key_offsets)
        self._source.restore(own, seq)


def _on_cpu(codec: Codec) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in codec.state().items()}
