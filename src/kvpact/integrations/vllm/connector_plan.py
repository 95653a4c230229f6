"""What the scheduler's side of the connector tells the workers, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpact.snapshot import Identity


@dataclass(frozen=True)
class Piece:
    """A chunk of a request's tokens. `key`: in the store, without the rank."""

    key: str
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Chunks that go into pages.

    - `pieces`: one behind the other.
    - `pages`: where they go; those that a request has already are left out.
    - `skip`: pages of the first chunk that are left out.
    """

    request: str
    identity: Identity
    pieces: tuple[Piece, ...]
    pages: tuple[int, ...]
    skip: int


@dataclass(frozen=True)
class Save:
    """Chunks that this step completes, and their pages, in order."""

    identity: Identity
    pieces: tuple[Piece, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What workers do in one step.

    `saves`: pages to copy when the step has written them; `idle`: no token is computed: there is
    time to wait for loads.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


def of_rank(identity: Identity, rank: int, ranks: int) -> Identity:
    """Return whose tokens a rank's chunks say that they hold: no other rank takes them."""
    return replace(identity, tenant=f"{identity.tenant} {rank}of{ranks}")


def entry_name(key: str, rank: int, ranks: int) -> str:
    """Return the store's key of one rank's part of a chunk: the heads that it holds."""
    return f"{key}-{rank}of{ranks}"
