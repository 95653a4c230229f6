"""A budget of bytes: how many tokens the K and the V of each layer hold by which spec.

A cache with a budget begins on the first *rung* of a ladder of specs. Where all would not fit any
more, the K or the V of a layer takes the next rung, in the same call. The schedule follows from the
budget, the cache's shape and an order alone, so that the same tokens have the same bytes in one
piece as in small ones. The next one to take a rung is where a byte saved costs least: its
*sensitivity* times the rise of the distortion of its codes (3.65 times for a bit less, measured on
`trellis`), per byte; of equals those go first that lie farthest from those that have gone, V before
K. The package's README ("Budgets") says what the plan leaves room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch

from kvpact.cache.stats import stream_facts
from kvpact.cache.stream.advance import SLACK
from kvpact.cache.stream.stream import PIECE
from kvpact.errors import BudgetExceeded
from kvpact.files import size_text
from kvpact.geometry import CacheGeometry
from kvpact.methods import Method
from kvpact.spec import Spec
from kvpact.units import QUERIES, StreamFacts, unit_of

PER_BIT = 3.65
AHEAD = 64
STEP = 64
"""Tokens between two lengths at which a rung may be taken; later ones are at 1/64 of the length."""
MOST_TOKENS = 1 << 24

Part = tuple[int, int]
"""A layer, and 0 for its K or 1 for its V."""


class Change(NamedTuple):
    """From more than `tokens` tokens on a layer has another spec."""

    tokens: int
    spec: Spec


@dataclass(frozen=True)
class Schedule:
    """The spec of each layer by length, within a `budget` of bytes, for so many rows.

    `max_tokens`: at the lowest rungs (`MOST_TOKENS`: no limit); `facts`: of a method for K (0) or V
    (1).
    """

    budget: int
    batch: int
    layers: tuple[tuple[Change, ...], ...]
    max_tokens: int
    facts: Mapping[tuple[Method, int], StreamFacts]
    heads: int
    itemsize: int

    def spec(self, layer: int, tokens: int) -> Spec:
        """Return the spec of a layer at a length."""
        changes = [x for x in self.layers[layer] if x.tokens < tokens]
        return (changes or self.layers[layer][:1])[-1].spec

    def layer_bytes(self, layer: int, tokens: int) -> int:
        """Return the most bytes that a layer holds of so many tokens."""
        if not tokens:
            return 0
        spec = self.spec(layer, tokens)
        pair = self.facts[spec.key, 0], self.facts[spec.value, 1]
        return sum(self._bytes(facts, tokens) for facts in pair)

    def bits(self, tokens: int) -> float:
        """Return the mean bits per number of K and V in slots, of all layers, at a length."""
        return self._mean_bits([self.spec(layer, tokens) for layer in range(len(self.layers))])

    def _mean_bits(self, specs: Sequence[Spec]) -> float:
        keys, values = ([spec.key for spec in specs], [spec.value for spec in specs])
        flat = [self.facts[x, 0] for x in keys] + [self.facts[x, 1] for x in values]
        return 8 * sum(x.slot for x in flat) / max(sum(x.width for x in flat), 1)

    def lengths(self) -> list[int]:
        """Return the lengths after which a layer has another spec."""
        return sorted({x.tokens for layer in self.layers for x in layer if x.tokens})

    def check_length(self, total: int) -> None:
        """Raise `BudgetExceeded` unless so many tokens fit."""
        if total > self.max_tokens:
            raise BudgetExceeded(
                f"{total:,} tokens do not fit into {size_text(self.budget)}: at the lowest rungs "
                f"{self.max_tokens:,} do; truncate, or make a cache with a larger budget or with "
                "rungs of fewer bits"
            )

    def ladder(self, layer: int, held: int, new: int) -> tuple[Change, ...]:
        """Return the changes of a layer on the way of a call: all of them, or from its end on."""
        total, changes = held + new, self.layers[layer]
        if not self.crowded(held, new):
            return changes
        return Change(0, self.spec(layer, total)), *(x for x in changes if x.tokens >= total)

    def crowded(self, held: int, new: int) -> bool:
        """Return whether a call could need more bytes while layers take its rungs one by one."""
        return new > AHEAD and self._apart(held, held + new) > self.budget

    def _apart(self, held: int, total: int) -> int:
        """Return the most bytes while layers go from `held` to `total` tokens, in any order."""
        layers = range(len(self.layers))
        most = [max(self.layer_bytes(i, n) for n in (held, total)) for i in layers]
        return sum(most) + max(0, *(self._climbing(i, held, total) - most[i] for i in layers))

    def _climbing(self, layer: int, held: int, total: int) -> int:
        """Return the most bytes of a layer, old and new, while it takes the rungs of a call."""
        passed = [x for x in self.layers[layer] if held <= x.tokens < total and x.tokens]
        before, once, after = self.spec(layer, max(held, 1)), [0], 0
        for side in (0, 1):
            last = old = before.value if side else before.key
            for tokens, spec in passed:
                new = spec.value if side else spec.key
                if new != old:
                    both = [new] if old is last and old.name == "none" and not held else [old, new]
                    sizes = (self._bytes(self.facts[x, side], tokens) for x in both)
                    once.append(after + self.pieces + sum(sizes))
                    old = new
            after += self._bytes(self.facts[old, side], total)
        return self.layer_bytes(layer, held) + max(*once, after + self.pieces) if passed else 0

    def _bytes(self, facts: StreamFacts, tokens: int) -> int:
        return _most(facts, tokens, self.batch, self.heads, self.itemsize)

    @property
    def pieces(self) -> int:
        """Bytes of the tokens that are decompressed at a time."""
        return _pieces(self.facts.values(), self.batch * self.heads)

    def stats(self, tokens: int, specs: Sequence[Spec]) -> dict[str, Any]:
        """Return what became of the budget, with the specs of now: `ContiguousCache.stats`."""
        later = [x for x in self.lengths() if x >= tokens]
        return {
            "max_tokens": self.max_tokens,
            "bits": self._mean_bits(specs),
            "next": later[0] if later else None,
            "specs": dict(Counter(map(str, specs))),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the schedule in plain types."""
        layers = [[[x.tokens, str(x.spec)] for x in layer] for layer in self.layers]
        return {"budget": self.budget, "max_tokens": self.max_tokens, "layers": layers}


@lru_cache(maxsize=1 << 14)
def _most(facts: StreamFacts, tokens: int, batch: int, heads: int, itemsize: int) -> int:
    """Return the most bytes of a stream of up to so many tokens, with what a tail leaves room."""
    unit = unit_of(facts.group, facts.window)
    whole = tokens // unit * unit
    ends = [x + facts.window % unit for x in (whole - 1, whole - unit - 1)] + [whole - 1]
    counts = {tokens, *(x for x in ends if 0 < x < tokens)}
    held = max(sum(facts.held(x, batch, heads, itemsize).values()) for x in counts)
    seen = QUERIES if facts.slot >= 2 * facts.width else 0  # until a later rung learns of them
    return held + batch * heads * facts.width * (SLACK * itemsize + seen)


def _pieces(facts: Iterable[StreamFacts], heads: int) -> int:
    """Return the bytes of the tokens of all rows' heads that are decompressed at a time."""
    return 3 * PIECE * heads * 4 * max(x.width for x in facts)


class Planner:
    """Grows a cache that does not exist, and takes rungs (most bytes first) where it has to.

    `sensitivity`: what a distortion of a part costs; `extra`: bytes of the budget for others.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        rungs: Sequence[Sequence[Spec]],
        budget: int,
        batch: int,
        dtype: torch.dtype,
        sensitivity: Mapping[Part, float],
        extra: int = 0,
    ) -> None:
        self.rungs, self.budget, self.extra = rungs, budget - extra, extra
        self.shape = batch, geometry.num_kv_heads, dtype.itemsize
        self.layers = geometry.num_layers
        one = replace(geometry, num_layers=1, dtype=dtype)
        self.known: dict[tuple[Method, int], StreamFacts] = {}
        for spec in dict.fromkeys(spec for rung in rungs for spec in rung):
            self.known[spec.key, 0], self.known[spec.value, 1] = stream_facts(spec, one)
        self.facts: dict[Part, list[StreamFacts]] = {}
        for layer, own in enumerate(zip(*rungs, strict=True)):
            self.facts[layer, 0] = [self.known[spec.key, 0] for spec in own]
            self.facts[layer, 1] = [self.known[spec.value, 1] for spec in own]
        self.parts = list(self.facts)
        self.sensitivity = {part: sensitivity.get(part, 1.0) for part in self.parts}
        order = _spread(self.layers)
        self.turn = {part: (order[part[0]], 1 - part[1]) for part in self.parts}
        self.at = dict.fromkeys(self.parts, 0)
        self.both, self.peaks = False, dict.fromkeys(self.parts, 0)
        self.pieces = _pieces(self.known.values(), batch * geometry.num_kv_heads)

    def most(self, part: Part, tokens: int, rung: int | None = None) -> int:
        """Return the most bytes of a part of so many tokens, at a rung or where it is."""
        rung = self.at[part] if rung is None else rung
        return _most(self.facts[part][rung], tokens, *self.shape)

    def need(self, tokens: int) -> int:
        """Return the bytes that have to be there for all tokens, and to take a next rung."""
        held = [self.most(part, tokens) for part in self.parts]
        # In a first call K takes all its rungs, then V, while all after them hold nothing.
        so_far = accumulate(held, initial=0)
        first = max(a + self.peaks[p] for p, a in zip(self.parts, so_far, strict=False))
        more = self.transient(tokens)
        return max(sum(held) + more, first if more else 0)  # at the last rungs in pieces

    def transient(self, tokens: int) -> int:
        """Return what a layer takes at most while it is compressed again."""
        most, last = 0, len(self.rungs) - 1
        for layer in range(self.layers):
            parts = [p for p in ((layer, 0), (layer, 1)) if self.at[p] < last]
            sizes = [self.most(p, tokens, self.at[p] + 1) for p in parts]
            own = (sum if self.both else max)(sizes or [0])
            most = max(most, own + self.pieces * bool(parts))
        return most

    def worth(self, part: Part, tokens: int) -> tuple[float, tuple[int, int], Part]:
        """Return what the next rung of a part costs per byte, its turn among equals, and it."""
        now, then = self.facts[part][self.at[part] : self.at[part] + 2]
        saved = self.most(part, tokens) - self.most(part, tokens, self.at[part] + 1)
        cost = self.sensitivity[part] * (_distortion(then) - _distortion(now))
        return cost / saved if saved > 0 else inf, self.turn[part], part

    def steps(self, tokens: int) -> Iterator[Part]:
        """Yield the parts whose next rung costs least; of a layer one, unless `both` fit."""
        last, taken = len(self.rungs) - 1, set()
        heap = [self.worth(part, tokens) for part in self.parts if self.at[part] < last]
        heapify(heap)
        while heap:
            part = heappop(heap)[2]
            if not self.both and part[0] in taken:
                continue
            yield part
            taken.add(part[0])
            if self.at[part] < last:
                heappush(heap, self.worth(part, tokens))

    def plan(self) -> Schedule:
        """Return the schedule, with room for both parts of a layer where it holds more."""
        one = self.planned()
        self.both = True
        changes, tokens = max(one, self.planned(), key=lambda found: found[1])
        batch, heads, itemsize = self.shape
        if not tokens:
            raise BudgetExceeded(
                f"a budget of {size_text(self.budget + self.extra)} has no room for {STEP} tokens "
                f"of {batch} row{'s' * (batch != 1)}; the least one is "
                f"{size_text(self.least() + self.extra)}"
            )
        layers = tuple(map(tuple, changes))
        return Schedule(self.budget, batch, layers, tokens, self.known, heads, itemsize)

    def planned(self) -> tuple[list[list[Change]], int]:
        """Return the changes of each layer, and the tokens that fit."""
        self.at, self.peaks = (dict.fromkeys(self.parts, 0) for _ in range(2))
        changes: list[list[Change]] = [[Change(0, spec)] for spec in self.rungs[0]]
        tokens = 0
        while tokens < MOST_TOKENS:
            end = tokens + max(STEP, tokens // STEP // STEP * STEP)
            before, peaks = dict(self.at), dict(self.peaks)
            steps = self.steps(end)
            while self.need(end + AHEAD) > self.budget:
                part = next(steps, None)
                if part is None:
                    return changes, tokens
                if tokens and _distortion(self.facts[part][self.at[part]]):
                    own = self.most(part, tokens) + self.most(part, tokens, self.at[part] + 1)
                    self.peaks[part] = max(peaks[part], own + self.pieces)
                self.at[part] += 1
            for layer in range(self.layers):
                rungs = [self.at[layer, side] for side in (0, 1)]
                if rungs != [before[layer, side] for side in (0, 1)]:
                    k, v = (self.rungs[rung][layer] for rung in rungs)
                    spec = k if rungs[0] == rungs[1] else Spec(k.key, v.value)
                    if changes[layer][-1].tokens == tokens:
                        changes[layer].pop()
                    changes[layer].append(Change(tokens, spec))
            tokens = end
        return changes, tokens

    def least(self) -> int:
        """Return the bytes of a few tokens at the lowest rungs."""
        self.peaks = dict.fromkeys(self.parts, 0)
        self.at = dict.fromkeys(self.parts, len(self.rungs) - 1)
        return self.need(STEP + AHEAD)


def _distortion(facts: StreamFacts) -> float:
    """Return the distortion of codes, where that of 4 bits is 1."""
    bits = 8 * facts.slot / facts.width if facts.width else 16
    return 0.0 if bits >= 16 else float(PER_BIT ** (4.2 - bits))


@lru_cache(maxsize=16)
def _spread(layers: int) -> tuple[int, ...]:
    """Return the turn of each layer: the first half of the turns are spread over all layers."""
    width = max(layers - 1, 1).bit_length()
    by_turn = sorted(range(layers), key=lambda i: int(f"{i:0{width}b}"[::-1], 2))
    turn = [0] * layers
    for place, layer in enumerate(by_turn):
        turn[layer] = place
    return tuple(turn)
