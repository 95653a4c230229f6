"""The shape of one layer's cache, from a config, a table or a call of the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from kvpact.errors import SpecError
from kvpact.geometry import CacheGeometry
from kvpact.spec import Spec, parse_spec
from kvpact.units import TILE, out_of_window, segment_tokens

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
            return self._window_bytes(self.sliding, tokens, batch, itemsize)
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

    def _window_bytes(self, sliding: str, tokens: int, batch: int, itemsize: int) -> int:
        """Return the bytes of the packed window after so many tokens in one call."""
        import torch

        from kvpact.cache.stats import stream_facts

        dtype = torch.float32 if itemsize == 4 else torch.float16
        facts = stream_facts(parse_spec(sliding), self.geometry(dtype))
        assert self.limit is not None
        least = lcm(TILE, *(x.group for x in facts))
        packed = [out_of_window(x.group, x.window, tokens) for x in facts]
        ready = all(n >= x.learns_from for x, n in zip(facts, packed, strict=True))
        first = max(min([tokens - self.limit, *packed]), 0) if ready else 0
        pairs = zip(facts, packed, strict=True)
        sizes = [segment_tokens(x.group, n - first + least) for x, n in pairs]
        held = tokens - first // lcm(*sizes) * lcm(*sizes)
        return sum(sum(x.held(held, batch, self.heads, itemsize).values()) for x in facts)


def with_packed_windows(shapes: Sequence[LayerShape], sliding: str | Spec) -> list[LayerShape]:
    """Return shapes whose windows are packed by a spec. Raises `SpecError`."""
    text, kind = str(parse_spec(sliding).with_options(sinks=0)), "sliding_attention"
    if not any(shape.kind == kind for shape in shapes):
        raise SpecError("no layer of this model has sliding attention alone: leave sliding out")
    return [x._replace(sliding=text) if x.kind == kind else x for x in shapes]
