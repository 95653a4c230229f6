"""What a real cache holds: drawn after appends, and in a table after five rollbacks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import kvpact
from kvpact.cache.contiguous import ContiguousCache
from kvpact.snapshot.state import StreamState
from kvpact.spec import parse_spec
from kvpact_pages.results import table
from kvpact_pages.svg import Drawing

GROUPED = "kivi:bits=4,group=32,sinks=4,window=24"
SINGLE = "turboquant:bits=4,sinks=4,window=24"
HELD, DIM = 108, 64
CELL, LEFT, WIDTH = 3.05, 44.0, 400.0  # of a token, of the lanes, of all
PACKED, TAIL, SINKS = "c0", "c2", "c1"


class State(NamedTuple):
    """What a stream of keys holds.

    Parameters
    ----------
    length, packed, tail_start, sinks : int
        Tokens held, those that have slots, where the exact tail begins, exact first tokens.
    exact : tuple of bool
        Whether each token reads back as it was given.
    group : int
        Tokens that are packed together.
    keep : int
        Where the last rollback cut; `length` where there was none.
    fresh : bool
        Whether the keys of a cache that was given these tokens alone lie in the same bytes.
    """

    length: int
    packed: int
    tail_start: int
    sinks: int
    exact: tuple[bool, ...]
    group: int
    keep: int
    fresh: bool

    @property
    def cut_group(self) -> range:
        """Tokens of the group that the rollback cut, whose scales stayed as they were."""
        start = self.keep - self.keep % self.group
        return range(0) if self.fresh else range(start, start + self.group)

    @property
    def exact_from(self) -> int:
        """The first token that is read from the tail."""
        last = [i for i in range(self.sinks, self.length) if not self.exact[i]]
        return last[-1] + 1 if last else min(self.sinks, self.length)


class Story(NamedTuple):
    """A rollback: to how many tokens, how many come after it, and why it happens."""

    keep: int
    then: int
    why: str


STORIES = (
    Story(105, 0, "a draft was rejected"),
    Story(90, 0, "back over most of the window"),
    Story(50, 0, "back into an old group"),
    Story(50, 40, "the same, and 40 more tokens"),
    Story(2, 0, "back to the first two tokens"),
)


def tokens(count: int, seed: int) -> Tensor:
    """Return keys `[1, 1, count, DIM]`, the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 1, count, DIM, generator=generator)


def cache_of(spec: str, given: Tensor) -> ContiguousCache:
    """Return a cache of one layer that was given tokens one by one."""
    cache = kvpact.create_cache(spec, kvpact.CacheGeometry(1, 1, DIM))
    assert isinstance(cache, ContiguousCache)
    store(cache, given)
    return cache


def store(cache: ContiguousCache, given: Tensor) -> None:
    """Give a cache tokens one by one."""
    for index in range(given.shape[2]):
        token = given[:, :, index : index + 1]
        cache.store(0, k=token, v=token)


def rolled_back(spec: str, keep: int, then: int) -> tuple[ContiguousCache, Tensor]:
    """Return a cache after `HELD` tokens, a rollback and `then` more, and the tokens it holds."""
    given, later = tokens(HELD, seed=1), tokens(then, seed=2)
    cache = cache_of(spec, given)
    cache.truncate(keep)
    store(cache, later)
    return cache, torch.cat([given[:, :, :keep], later], 2)


def keys(cache: ContiguousCache) -> StreamState:
    """Return what a cache holds of its keys."""
    streams = cache.snapshot().layer(0).streams
    assert streams is not None
    return streams[0]


def alike(one: StreamState, other: StreamState) -> bool:
    """Tell whether two streams hold the same slots and the same exact tokens."""
    if (one.packed, one.start) != (other.packed, other.start):
        return False
    pairs = [(one.tail, other.tail)]
    if one.sinks is not None and other.sinks is not None:
        pairs.append((one.sinks, other.sinks))
    pairs += [(one.slots[name], other.slots[name]) for name in one.slots]
    return all(torch.equal(a, b) for a, b in pairs)


def state(cache: ContiguousCache, given: Tensor, spec: str, keep: int) -> State:
    """Return what a cache holds of the tokens it was given, `keep` of them before a rollback."""
    stream = keys(cache)
    more = given[:, :, :1]
    read = cache.fork().prefill(0, more, more).k[:, :, :-1]  # as stored before that token
    exact = (read == given).all(-1).flatten().tolist()
    length, method = given.shape[2], parse_spec(spec).key
    fresh = alike(stream, keys(cache_of(spec, given)))
    return State(
        length,
        stream.packed,
        stream.start,
        min(method.sinks, length),
        tuple(exact),
        method.key_codec(DIM, torch.float32).group,
        keep,
        fresh,
    )


def cells(found: State) -> list[dict[int, str]]:
    """Return how each token is drawn in each lane: faint where another copy is read."""

    def kind(colour: str, is_read: bool) -> str:
        return f"{colour} fill" + ("" if is_read else " faint")

    exact_from = found.exact_from
    slots = {t: kind(PACKED, found.sinks <= t < exact_from) for t in range(found.packed)}
    tail = {
        t: kind(TAIL, t >= max(exact_from, found.sinks))
        for t in range(found.tail_start, found.length)
    }
    sinks = {t: kind(SINKS, True) for t in range(found.sinks)}
    return [slots, tail, sinks]


def whole(spec: str) -> str:
    """Draw a stream after `HELD` tokens."""
    given = tokens(HELD, seed=1)
    found = state(cache_of(spec, given), given, spec, HELD)
    picture = Drawing(WIDTH, 130, f"A stream of {HELD} tokens with {spec}")
    picture.text(12, 17, f"{HELD} tokens, {spec}", "head")
    for row, (name, drawn) in enumerate(zip(("slots", "tail", "sinks"), cells(found), strict=True)):
        picture.text(LEFT - 6, 40.5 + 13 * row, name, "small", "end")
        for token, kind in drawn.items():
            picture.rect(LEFT + CELL * token, 32 + 13 * row, CELL - 0.7, 9, kind)
    for token in range(0, HELD, found.group if found.group > 1 else 32):
        across = LEFT + CELL * token - 0.35
        picture.line(across, 30, across, 72, "rule")
        picture.text(across, 82, str(token), "small", "middle")
    picture.text(LEFT + CELL * HELD, 82, str(HELD), "small", "middle")
    left = 12.0
    for colour, name in (
        (PACKED, "packed"),
        (TAIL, "exact, at the end"),
        (SINKS, "exact, at the beginning"),
    ):
        picture.rect(left, 94, 9, 9, f"{colour} fill")
        picture.text(left + 13, 102, name, "small")
        left += 24 + 5.2 * len(name)
    picture.text(12, 118, "pale: held, and another copy of the token is read", "small")
    return picture.svg()


def rollbacks() -> str:
    """Return what five rollbacks leave."""
    rows = []
    for story in STORIES:
        found = state(*rolled_back(GROUPED, story.keep, story.then), GROUPED, story.keep)
        exact = found.length - max(found.exact_from, found.sinks)
        fresh = "yes" if found.fresh else f"no: the group at {found.cut_group.start} is cut"
        kept = [f"{HELD} to {story.keep}: {story.why}"]
        rows.append([*kept, str(found.length), str(found.packed), str(exact), fresh])
    columns = ("rollback", "tokens held", "packed", "read from the tail")
    return table((*columns, "the bytes of a cache that never held the others"), rows)


def pictures() -> dict[str, str]:
    """Return the drawings by file name."""
    return {"stream-grouped.svg": whole(GROUPED), "stream-single.svg": whole(SINGLE)}


BLOCKS = {"stream-rollbacks": rollbacks}
