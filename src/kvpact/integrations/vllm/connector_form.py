"""What an engine's pages hold, and the kind of chunks that are made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from kvpact.cache.saved import PAGE_TOKENS
from kvpact.errors import GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.vllm.setting import codecs
from kvpact.methods import Codec
from kvpact.prefixes.chunks import ChunkKind
from kvpact.snapshot import Identity
from kvpact.spec import Spec


@dataclass(frozen=True)
class Form:
    """Layers of one rank, and how their tokens are stored.

    - `layers`: vLLM's names, in the order of the model.
    - `specs`: of each of them.
    - `geometry`: the rank's heads, with the dtype of the model's K and V.
    - `page`: tokens of one of vLLM's pages.
    - `rank`, `ranks`: which of how many ranks: each has other heads.
    """

    layers: tuple[str, ...]
    specs: tuple[Spec, ...]
    geometry: CacheGeometry
    page: int
    rank: int
    ranks: int

    @cached_property
    def codecs(self) -> tuple[tuple[Codec, Codec], ...]:
        """The codecs of K and V of each layer."""
        dtype = self.geometry.dtype
        assert dtype is not None
        made = {
            spec: codecs(spec, self.geometry.head_dim, self.geometry.value_dim, dtype)
            for spec in set(self.specs)
        }
        return tuple(made[spec] for spec in self.specs)

    def chunk(self, wanted: int | None) -> int:
        """Return the tokens of a chunk. Raises `GeometryError`."""
        size = lcm(PAGE_TOKENS, self.page) if wanted is None else wanted
        if size % self.page:
            raise GeometryError(
                f"chunk={wanted}: a chunk is whole pages; vLLM's have {self.page} tokens"
            )
        return size

    def kind(self, identity: Identity, chunk: int) -> ChunkKind:
        """Return the kind of chunks of one model, adapter and tenant."""
        return ChunkKind(self.specs, self.geometry, self.codecs, identity, chunk)


def in_order(layers: Sequence[str]) -> tuple[str, ...]:
    """Return names of layers in the order of the numbers in them."""
    return tuple(sorted(layers, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))
