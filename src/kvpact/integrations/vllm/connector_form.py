"""The form of an engine's pages, and the chunks that the scheduler's side gives the workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

from kvpact.cache.layer.states import PAGE_TOKENS
from kvpact.errors import GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import Learnt
from kvpact.integrations.pages.page import codecs
from kvpact.methods import Codec
from kvpact.prefixes.chunks import ChunkKind
from kvpact.snapshot import Identity
from kvpact.spec import Spec


@dataclass(frozen=True)
class StoredForm:
    """Layers of one rank in the order of the model, and how their tokens are stored."""

    layers: tuple[str, ...]
    specs: tuple[Spec, ...]
    geometry: CacheGeometry  # of the rank's heads
    page: int  # tokens of vLLM's
    rank: int
    ranks: int
    learnt: tuple[Learnt, ...] = field(compare=False, repr=False)  # all ranks' heads

    @cached_property
    def codecs(self) -> tuple[tuple[Codec, Codec], ...]:
        """The codecs of K and V of each layer."""
        geometry = self.geometry
        assert geometry.dtype is not None
        kind = geometry.head_dim, geometry.value_dim, geometry.dtype
        both = zip(self.specs, self.learnt, strict=True)
        return tuple(codecs(spec, *kind, learnt) for spec, learnt in both)

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


@dataclass(frozen=True)
class ChunkPiece:
    """A chunk of a request's tokens. `key`: in the store, without the rank."""

    key: str
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Chunks that go into pages, one after the other, without the first `skip` pages."""

    request: str
    identity: Identity
    pieces: tuple[ChunkPiece, ...]
    pages: tuple[int, ...]
    skip: int


@dataclass(frozen=True)
class Save:
    """Chunks that this step completes, and their pages, in order."""

    identity: Identity
    pieces: tuple[ChunkPiece, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """The work of workers in one step; if `idle`, no token is computed: loads can be waited for."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


def of_rank(identity: Identity, rank: int, ranks: int) -> Identity:
    """Return the identity in a rank's chunks, which keeps other ranks from taking them."""
    return replace(identity, tenant=f"{identity.tenant} {rank}of{ranks}")


def entry_name(key: str, rank: int, ranks: int) -> str:
    """Return the store's key of one rank's part of a chunk: the heads that it holds."""
    return f"{key}-{rank}of{ranks}"
