"""What a real cache holds: drawn after appends, and in a table after five rollbacks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from matplotlib import rc_context
from torch import Tensor

import kvpact
from kvpact.cache import ContiguousCache
from kvpact.evaluate.canvas import COLOURS
from kvpact.spec import parse_spec
from kvpact_pages.chart import STYLE, plot, svg
from kvpact_pages.results import table

GROUPED = "kivi:bits=4,group=32,sinks=4,window=24"
SINGLE = "turboquant:bits=4,sinks=4,window=24"
HELD, DIM = 108, 64


class State(NamedTuple):
    """What a stream of keys holds."""

    length: int
    packed: int  # tokens that have slots
    tail_start: int
    sinks: int
    exact: tuple[bool, ...]  # whether each token reads back as it was given
    group: int  # tokens that are packed together
    keep: int  # where the last rollback cut; `length` where there was none
    fresh: bool  # whether a cache that was given these tokens alone holds the same bytes

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


def state(cache: ContiguousCache, given: Tensor, spec: str, keep: int) -> State:
    """Return what a cache holds of the tokens it was given, `keep` of them before a rollback."""
    found, length, method = cache.snapshot(), given.shape[2], parse_spec(spec).key
    streams = found.layer(0).streams
    assert streams is not None
    more = given[:, :, :1]
    read = cache.fork().prefill(0, more, more).k[:, :, :-1]  # as stored before that token
    exact = (read == given).all(-1).flatten().tolist()
    return State(
        length,
        streams[0].packed,
        streams[0].start,
        min(method.sinks, length),
        tuple(exact),
        method.key_codec(DIM, torch.float32).group,
        keep,
        found.digest == cache_of(spec, given).snapshot().digest,
    )


def lanes(found: State) -> dict[str, dict[int, bool]]:
    """Return the tokens that are held in each way, and whether it is this copy that is read."""
    first, last = found.sinks, found.exact_from
    return {
        "packed slots": {t: first <= t < last for t in range(found.packed)},
        "exact tail": {t: t >= max(first, last) for t in range(found.tail_start, found.length)},
        "exact sinks": dict.fromkeys(range(first), True),
    }


@rc_context(STYLE)
def whole(spec: str) -> str:
    """Draw a stream after `HELD` tokens."""
    given = tokens(HELD, seed=1)
    found = state(cache_of(spec, given), given, spec, HELD)
    axes = plot(f"{HELD} tokens, {spec}", (5.2, 1.6))
    for (name, held), colour in zip(lanes(found).items(), COLOURS, strict=False):
        shades = [(colour, 1.0 if read else 0.28) for read in held.values()]
        axes.barh([name] * len(held), 0.77, 0.7, list(held), color=shades)
    axes.invert_yaxis()
    axes.set_xticks([*range(0, HELD, found.group if found.group > 1 else 32), HELD])
    axes.set_xlabel("token; pale where another copy of it is read")
    return svg(axes)


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
