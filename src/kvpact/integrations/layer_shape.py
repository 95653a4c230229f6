"""What the cache of one layer of a model holds, whoever tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpact.geometry import CacheGeometry

if TYPE_CHECKING:
    import torch


class LayerShape(NamedTuple):
    """What the cache of one layer holds; heads and widths are 0 where it has no K and V.

    `kind`: as transformers names it; `compressed`: whether its K and V are; `latent`: K is a latent
    and V the rotated part of the key; `limit`: tokens kept at most; `state_bytes`: of one sequence,
    however long; `index_width`: numbers per token beside K and V, of indexers.
    """

    kind: str
    compressed: bool
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    latent: bool = False
    limit: int | None = None
    state_bytes: int = 0
    index_width: int = 0

    def geometry(self, dtype: torch.dtype) -> CacheGeometry:
        """Return the geometry of a cache of this layer alone."""
        return CacheGeometry(1, self.heads, self.key_dim, self.value_dim, dtype, self.latent)

    def own_bytes(self, tokens: int, batch: int, itemsize: int) -> int:
        """Return the bytes that transformers holds of the layer, and no spec compresses."""
        kept = tokens if self.limit is None else min(tokens, self.limit)
        width = 0 if self.compressed else self.heads * (self.key_dim + self.value_dim)
        numbers = kept * (width + self.index_width)
        return batch * (numbers * itemsize + (self.state_bytes if tokens else 0))
