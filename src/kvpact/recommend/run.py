"""The steps of a recommendation: a survey of the model, plans for budgets, a verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from kvpact.evaluate import evaluate
from kvpact.evaluate.base import Progress
from kvpact.evaluate.feed import Steps, check_sizes, positions
from kvpact.recipe import SpecLike
from kvpact.recommend.allocate import Rung, allocate
from kvpact.recommend.base import (
    SIDES,
    Measured,
    Plan,
    Recommendation,
    RecommendationError,
    Sizes,
    Slot,
    predicted,
)
from kvpact.recommend.budget import budget_bytes, exact_sizes, is_spec, side_bytes
from kvpact.recommend.candidates import CANDIDATES, LADDER, candidates
from kvpact.recommend.gradients import measure_sensitivity, sensitivity_steps
from kvpact.recommend.measure import (
    SpecSizes,
    Survey,
    allowed,
    code_layers,
    measured_of,
    spec_sizes,
)
from kvpact.recommend.notes import bias_notes, outlier_notes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpact.integrations.transformers.record import Seen

FEWEST_DRAWS, MOST_DRAWS = 4, 8
_DRAWS = 24  # of all layers together: the fewer layers, the more a few tokens decide


def survey(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    chunk: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Measure what errors of K and V cost a model on a text, and how large those of specs are.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, in evaluation mode; left as it was.
    token_ids : Tensor
        int64 ``[N]``; predictions are for these.
    chunk : int
        Tokens fed at a time, as by `evaluate`.
    seed : int
        Of random directions.
    progress : callable, optional
        ``progress(done, total, what)`` after each backward pass, and each layer and spec.

    Raises
    ------
    EvaluationError
        Too few tokens for the chunk, or more than the model has positions.
    KVPactError
        A model whose attention can't be seen (see `seen_attention`).
    """
    from kvpact.integrations.transformers import key_offsets
    from kvpact.integrations.transformers.record import full_attention_layers

    check_sizes(len(token_ids), chunk, positions(model))
    count = len(full_attention_layers(model))
    draws = min(max(_DRAWS // count, FEWEST_DRAWS), MOST_DRAWS)
    passes = sensitivity_steps(len(token_ids), chunk, draws)
    steps = Steps(progress, passes + count * len(CANDIDATES))
    found = measure_sensitivity(model, token_ids, chunk=chunk, draws=draws, seed=seed, steps=steps)
    seen = found.seen
    widths = sorted({layer.k.shape[3] for layer in seen.layers.values()})
    reasons = {spec: allowed(spec, seen) for spec in candidates(widths[-1])}
    specs = [spec for spec, reason in reasons.items() if not reason]
    for _ in range(count * (len(reasons) - len(specs))):
        steps.done("left out")
    offsets = key_offsets(model)
    costs, refused = code_layers(found, specs, offsets, steps)
    reasons |= refused
    return Survey(
        seen=seen,
        costs=costs,
        draws=draws,
        left_out=tuple(f"{spec}: {reason}" for spec, reason in reasons.items() if reason),
        notes=(*bias_notes(offsets), *outlier_notes(seen)),
        tokens=len(token_ids),
    )


def plan(found: Survey, *, context: int = 32_768, budget: str = "30%") -> Plan:
    """Predict the KL of specs, and make a recipe within a budget.

    Parameters
    ----------
    found : Survey
        Of the model.
    context : int
        Tokens at which bytes are told.
    budget : str
        What the whole cache may take at the context: a share of the exact cache of 16 bits a
        number, bytes (see `budget_bytes`), or a spec, whose bytes are taken. Layers with a bounded
        window stay exact and count.

    Raises
    ------
    RecommendationError
        A context or a budget that allows nothing.
    """
    sizes = exact_sizes(found.seen, context)
    limit = _limit(budget, sizes, found.seen, context)
    room = limit - sizes.native
    none = {
        (i, side): side_bytes("none", side, x, context)
        for i, x in found.seen.layers.items()
        for side in SIDES
    }
    sizes_of = spec_sizes(found, context)
    measured = measured_of(found, sizes_of, range(found.draws))
    measured.sort(key=lambda x: x.predicted)
    fitting = [x.spec for x in measured if x.bytes <= room]
    if not fitting:
        raise RecommendationError(
            f"no spec that the model's K and V allow fits into budget {budget}, {limit:,} bytes of "
            f"{sizes.exact:,} at {context} tokens; give a larger --budget"
        )
    taken = allocate(_ladders(measured, none), room)
    return Plan(
        measured=tuple(measured),
        left_out=found.left_out,
        sizes=sizes,
        budget=limit,
        choice={slot: rung.spec for slot, rung in taken.items()},
        recipe_bytes=sizes.native + sum(rung.bytes for rung in taken.values()),
        recipe_predicted=_crossed(found, sizes_of, none, room),
        uniform=fitting[0],
        notes=found.notes,
        num_layers=found.seen.num_layers,
        tokens=found.tokens,
    )


def _crossed(
    found: Survey, sizes: Mapping[str, SpecSizes], none: Mapping[Slot, int], room: int
) -> float:
    """Return the mean over the draws of what each predicts of the recipe that the others make."""
    told = []
    for draw in range(found.draws):
        others = [x for x in range(found.draws) if x != draw]
        taken = allocate(_ladders(measured_of(found, sizes, others), none), room)
        alone = measured_of(found, sizes, [draw], smooth=False)
        choice = {slot: rung.spec for slot, rung in taken.items()}
        told.append(predicted({x.spec: x for x in alone}, choice))
    return fmean(told)


def _limit(budget: str, sizes: Sizes, seen: Seen, context: int) -> int:
    """Return the bytes of a budget, which may be a spec."""
    if not is_spec(budget):
        return budget_bytes(budget, sizes.exact)
    held = (side_bytes(budget, side, x, context) for x in seen.layers.values() for side in SIDES)
    return sizes.native + sum(held)


def _ladders(measured: Sequence[Measured], none: Mapping[Slot, int]) -> dict[Slot, list[Rung]]:
    """Return the rungs of each slot; `none` has the bytes of exact ones."""
    rungs = [x for x in measured if x.spec in LADDER]
    return {
        (layer, side): [
            Rung(one.spec, getattr(one, f"{side}_bytes")[layer], getattr(one, side)[layer])
            for one in rungs
        ]
        + [Rung("none", exact, 0.0)]
        for (layer, side), exact in none.items()
    }


def verify(
    model: PreTrainedModel,
    token_ids: Tensor,
    plan: Plan,
    *,
    chunk: int = 256,
    progress: Progress | None = None,
    model_name: str = "",
    text_name: str = "",
) -> Recommendation:
    """Measure the KL of a plan's recipe and of its best spec for all layers, in one run.

    Parameters
    ----------
    model, token_ids, chunk, progress, model_name, text_name
        See `evaluate`.
    plan : Plan
        Of the same model.

    Raises
    ------
    EvaluationError
        As `evaluate`.
    """
    entries: list[SpecLike] = [plan.recipe]
    if plan.uniform != plan.recipe:
        entries.append(plan.uniform)
    result = evaluate(
        model,
        token_ids,
        entries,
        chunk=chunk,
        progress=progress,
        model_name=model_name,
        text_name=text_name,
    )
    return Recommendation(plan, result)
