"""The key offsets of a cache's layers, checked."""

from __future__ import annotations

from collections.abc import Mapping

from kvpact.cache.checks import check_layer
from kvpact.errors import DtypeError, GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset

KeyOffsets = Mapping[int, KeyOffset]
"""Layer -> what is known of its keys by their positions."""


def check_offsets(offsets: KeyOffsets | None, geometry: CacheGeometry) -> dict[int, KeyOffset]:
    """Return the offsets by layer. Raises `DtypeError`, `GeometryError`, `LayerIndexError`."""
    if not isinstance(offsets, Mapping | None):
        raise DtypeError(f"key_offsets should be layer -> KeyOffset, not {offsets!r}")
    for layer, offset in (offsets or {}).items():
        check_layer(layer, geometry.num_layers)
        if not isinstance(offset, KeyOffset):
            raise DtypeError(f"the key offset of layer {layer} is no KeyOffset: {offset!r}")
        if geometry.latent:
            raise GeometryError("latents (MLA) have no key offsets: leave key_offsets out")
        offset.check_fits(geometry.num_kv_heads, geometry.head_dim)
    return dict(offsets or {})
