"""The shape of the cache of one layer of a model, whatever it is known from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpact.geometry import CacheGeometry

if TYPE_CHECKING:
    import torch


class LayerShape(NamedTuple):
    """The shape of the cache of one layer; heads and widths are 0 where it has no K and V.

    Where the model makes entries of `rate` tokens each, K and the index are of entries.
    """

    kind: str  # as transformers names it
    compressed: bool  # its K and V are
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    latent: bool = False  # K is a latent and V the rotated part of the key
    limit: int | None = None  # tokens kept at most
    state_bytes: int = 0  # of one sequence, however long
    index_width: int = 0  # numbers per token besides K and V
    rate: int = 1
    window_width: int = 0  # numbers per token of a window next to entries
    buffer_width: int = 0  # numbers of a token in no entry yet
    k_eq_v: bool = False  # keys are made of values
    made: bool = False  # and are not held
    sliding: str | None = None  # what its window is packed by, if it is

    def geometry(self, dtype: torch.dtype) -> CacheGeometry:
        """Return the geometry of a cache of this layer alone."""
        value_dim = max(self.value_dim, 1)  # a zero stands for a rotated part without width
        key_dim = 0 if self.made else self.key_dim
        return CacheGeometry(1, self.heads, key_dim, value_dim, dtype, self.latent)

    def own_bytes(self, tokens: int, batch: int, itemsize: int, *, packed: bool = False) -> int:
        """Return the bytes of the layer besides compressed K and V, index and window `packed`."""
        if self.sliding is not None and packed:
            from kvpact.integrations.packed_windows import window_bytes

            return window_bytes(self, tokens, batch, itemsize)
        kept = tokens if self.limit is None else min(tokens, self.limit)
        entries, rest = divmod(tokens, self.rate)
        width = self.heads * (self.key_dim + self.value_dim)
        numbers = kept * (self.window_width if self.compressed else width)
        numbers += rest * self.buffer_width
        groups = max(entries // 64 - 1, 0) if packed and self.compressed else 0
        # Integers, with four bytes of a scale per channel and group; the last 64 or more are exact.
        index = groups * (64 + 4) + (entries - 64 * groups) * itemsize
        whole = numbers * itemsize + self.index_width * index
        return batch * (whole + (self.state_bytes if tokens >= self.rate else 0))
