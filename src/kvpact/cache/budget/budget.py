"""Budgets of caches: bytes, a ladder of specs, and an order (see `ladder`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from kvpact.cache.budget.ladder import Part, Planner, Schedule
from kvpact.cache.stats import stream_facts
from kvpact.cache.stream.codecs import latent_spec
from kvpact.errors import SpecError
from kvpact.files import bytes_of, share_of
from kvpact.geometry import CacheGeometry
from kvpact.methods.fitted import FittedCodec
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import Spec, parse_spec

DEFAULT_RUNGS = ("none", *(f"trellis:bits={bits}" for bits in (6, 4, 3, 2)))


@dataclass(frozen=True)
class Budget:
    """The budget of a cache: bytes, a ladder and an order; see `Planner`.

    `extra`: bytes of a row that the cache does not hold itself, by the bytes of an exact number.
    """

    bytes: int
    rungs: tuple[tuple[Spec, ...], ...]
    sensitivity: Mapping[Part, float] | None = None
    extra: Mapping[int, int] | None = None

    def refuse(self, **others: object) -> None:
        """Raise `SpecError` where an option is used that does not go with a budget."""
        used = [name for name, value in others.items() if value is not None and value is not False]
        if used:
            raise SpecError(f"{' and '.join(used)} can't go with a budget: leave one of them out")

    def for_geometry(self, geometry: CacheGeometry) -> Budget:
        """Return the budget of a cache of such a shape: specs completed for latents."""
        if not geometry.latent:
            return self
        return replace(self, rungs=tuple(tuple(map(latent_spec, rung)) for rung in self.rungs))

    def schedule(self, geometry: CacheGeometry, batch: int, dtype: torch.dtype) -> Schedule:
        """Return the schedule of a cache of so many rows. Raises `BudgetExceeded`."""
        extra = batch * (self.extra or {}).get(dtype.itemsize, 0)
        order = tuple((self.sensitivity or {}).items())
        return _planned(geometry, self.rungs, self.bytes, batch, dtype, order, extra)


@lru_cache(maxsize=16)
def _planned(
    geometry: CacheGeometry,
    rungs: tuple[tuple[Spec, ...], ...],
    budget: int,
    batch: int,
    dtype: torch.dtype,
    order: tuple[tuple[Part, float], ...],
    extra: int,
) -> Schedule:
    """Return a schedule: planning takes tenths of a second, once for all caches of a kind."""
    return Planner(geometry, rungs, budget, batch, dtype, dict(order), extra).plan()


def ladder_of(
    first: Sequence[Spec] | None, rungs: Sequence[SpecLike] | None, layers: int
) -> tuple[tuple[Spec, ...], ...]:
    """Return the rungs of a ladder, one spec per layer each, checked. Raises `SpecError`.

    `first`: before default ones of fewer bits; exact if omitted; `rungs`: instead of both.
    """
    if rungs is not None:
        if isinstance(rungs, str | Spec | Mapping) or not rungs:
            raise SpecError("rungs is a sequence of specs, from the most bytes to the fewest")
        found = [tuple(layer_specs(rung, layers)) for rung in rungs]
    else:
        found = [(parse_spec(rung),) * layers for rung in DEFAULT_RUNGS]
        if first is not None:
            least = min(map(_bits, first))
            found = [tuple(first), *(rung for rung in found if _bits(rung[0]) < least)]
    found = [tuple(spec.apart() for spec in rung) for rung in found]
    for before, after in pairwise(found):
        if any(_bits(x) < _bits(y) for x, y in zip(before, after, strict=True)):
            raise SpecError("each of the rungs has to take fewer bits than the one before")
    methods = [x for rung in found for spec in rung for x in (spec.key, spec.value)]
    if len({(x.sinks, x.window) for x in methods if x.name != "none"}) > 1:
        raise SpecError("all rungs of a budget want the same sinks= and window=")
    for ladder in dict.fromkeys(zip(*found, strict=True)):
        for names in map(set, zip(*map(_learnt, ladder), strict=True)):
            if len(names - {""}) > 1:
                raise SpecError(
                    f"rungs that learn unlike things, {' and '.join(sorted(names - {''}))}, can't "
                    "take over what one another learnt: give rungs of one of them"
                )
    return tuple(found)


def _learnt(spec: Spec) -> tuple[str, ...]:
    """Return the names of what the codecs of K and of V learn; empty where they learn nothing."""
    pairs = zip((spec.key, spec.value), spec.codecs(64, 64, torch.bfloat16), strict=True)
    return tuple(x.learnt_name() * isinstance(codec, FittedCodec) for x, codec in pairs)


def _bits(spec: Spec) -> float:
    """Return the bits per number of slots, of K and V together, of heads of 64 channels."""
    shape = CacheGeometry(1, 1, 64, 64, torch.bfloat16)
    return 8 * sum(facts.slot for facts in stream_facts(spec, shape)) / 128


def budget_of(
    amount: int | str,
    rungs: tuple[tuple[Spec, ...], ...],
    sensitivity: Mapping[Part, float] | None = None,
    exact: int | None = None,
) -> Budget:
    """Return a budget of ``200MB``, 200000000, or ``25%`` of `exact` bytes; raises `SpecError`."""
    text = "" if isinstance(amount, bool) else str(amount)
    share = share_of(text)
    if share is not None and exact is None:
        raise SpecError(
            f"budget {amount!r} is a share of the exact cache at a length: add context=, or bytes"
        )
    count = bytes_of(text) if share is None else int(share * (exact or 0))
    if not count:
        raise SpecError(
            f"budget {amount!r} is no number of bytes such as '200MB' or '1.5GiB', and no share "
            "such as '25%'"
        )
    return Budget(count, rungs, sensitivity)
