"""The steps of a recommendation: a survey of the model, plans for budgets, a verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvpact.data import book_path
from kvpact.evaluate import TaskCase, evaluate, make_cases, score_tasks
from kvpact.evaluate.base import EvaluationError, Progress
from kvpact.evaluate.feed import Steps, check_sizes, part, positions
from kvpact.evaluate.task_source import token_counter
from kvpact.integrations.models import first_tokens, opened
from kvpact.integrations.sizes import length_of, size
from kvpact.key_offset import KeyOffset
from kvpact.recipe import SpecLike
from kvpact.recommend.base import (
    Measured,
    RecipePlan,
    Recommendation,
    RecommendationError,
    Sizes,
    Slot,
    predicted,
)
from kvpact.recommend.budget import (
    Rung,
    allocate,
    budget_bytes,
    check_budget,
    exact_sizes,
    slot_bytes,
)
from kvpact.recommend.gradients import measure_sensitivity, sensitivity_steps
from kvpact.recommend.measure import LADDER, Survey, code_layers, measured_of
from kvpact.spec import is_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvpact.integrations.transformers.attention.seen import Seen

FEWEST_DRAWS, MOST_DRAWS = 4, 8
_DRAWS = 24  # of all layers together: the fewer layers, the more a few tokens decide

CODING = 0.7  # time in which all candidates code a chunk in all layers, in forward passes over it

CALLS, QUESTION = 10, 256
"""Time that questions after a context take, in forward passes; tokens that one has at most."""

OUTLIER = 50.0
"""A channel is an outlier if its energy is so many times the median channel's of its head."""


def _draws(model: PreTrainedModel) -> int:
    from kvpact.integrations.transformers.attention.seen import full_attention_layers

    return min(max(_DRAWS // len(full_attention_layers(model)), FEWEST_DRAWS), MOST_DRAWS)


def recommend(
    model: PreTrainedModel | str | PathLike[str],
    text: str | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    budget: str | float = "30%",
    context: int | str = 32_768,
    tokens: int | str = 2048,
    chunk: int = 256,
    progress: Progress | None = None,
    model_name: str = "",
    text_name: str = "",
) -> Recommendation:
    """Recommend a spec, or a recipe by layer: gradients predict KL, one evaluation verifies.

    Parameters
    ----------
    model, text, tokenizer
        See `kvpact.evaluate`.
    budget : str or float
        Bytes that the cache may take: a share of the 16-bit cache (``30%``, .3), a size (``4GB``),
        or a spec, for as many bytes as it takes.
    context : int or str
        Tokens (``32k``) at which bytes are counted.
    tokens : int or str
        Tokens of the text to use; 768 are a third of the work.
    chunk, progress, model_name, text_name
        See `kvpact.evaluate.evaluate`.

    Raises
    ------
    KVPactError
        Too few tokens, a budget that allows nothing, no such model, or one whose attention can't
        be seen.

    Examples
    --------
    >>> found = kvpact.recommend("smollm2", budget="20%")  # doctest: +SKIP
    >>> cache = kvpact.CompressedCache(model, found.chosen)  # doctest: +SKIP
    """
    budget = f"{100 * budget:g}%" if isinstance(budget, float) else str(budget)
    context, tokens = length_of(context), length_of(tokens)
    network, tokenizer = opened(model, tokenizer)
    check_budget(network, budget, context)
    check_sizes(tokens, chunk, positions(network))
    text = book_path().read_text("utf-8") if text is None else text
    ids = first_tokens(tokenizer, text, tokens)
    chunks, draws = -(-len(ids) // chunk), _draws(network)
    cases = _tool_cases(network, tokenizer, text, len(ids))
    passes = sensitivity_steps(len(ids), chunk, draws) + CODING * chunks
    checks = 3.3 * chunks  # the exact cache and two others, which code
    whole = passes + checks + (0.0 if isinstance(cases, str) else 2.3 * (chunks + CALLS))
    begin, end = passes / whole, (passes + checks) / whole
    seen = survey(network, ids, chunk=chunk, progress=part(progress, 0, begin))
    found = verify(
        network,
        ids,
        plan(seen, context=context, budget=budget),
        chunk=chunk,
        progress=part(progress, begin, end),
        model_name=model_name,
        text_name=text_name,
    )
    if isinstance(cases, str):
        return replace(found, tools=cases)
    run: dict[str, Any] = {"chunk": chunk, "progress": part(progress, end, 1)}
    return replace(found, tools=score_tasks(network, tokenizer, cases, [found.chosen], **run))


def _tool_cases(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, tokens: int
) -> list[TaskCase] | str:
    """Return a context with calls of tools, or why there is none."""
    room = min(tokens, (positions(model) or tokens + QUESTION) - QUESTION)
    drawn: dict[str, Any] = {"depths": (0.0, 0.5, 1.0), "samples": 1, "tasks": ("tools",)}
    try:
        return make_cases(text, token_counter(tokenizer), tokens=room, **drawn)
    except EvaluationError as error:
        return str(error)


def survey(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    chunk: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Measure what errors of K and V cost a model on a text, and how large those of specs are.

    `token_ids`: int64 ``[N]``, for which predictions are; `seed`: of random directions. A model
    whose attention can't be seen is a `KVPactError` (see `seen_attention`).
    """
    from kvpact.integrations.transformers import key_offsets

    check_sizes(len(token_ids), chunk, positions(model))
    draws = _draws(model)
    coding = CODING * len(token_ids) / chunk
    steps = Steps(progress, sensitivity_steps(len(token_ids), chunk, draws) + coding)
    found = measure_sensitivity(model, token_ids, chunk=chunk, draws=draws, seed=seed, steps=steps)
    offsets = key_offsets(model)
    costs, refused = code_layers(found, offsets, steps, coding)
    return Survey(
        seen=found.seen,
        costs=costs,
        draws=draws,
        left_out=tuple(f"{spec}: {reason}" for spec, reason in refused.items()),
        notes=(*bias_notes(offsets), *outlier_notes(found.seen)),
        tokens=len(token_ids),
    )


def bias_notes(offsets: Mapping[int, KeyOffset]) -> list[str]:
    """Return notes on layers whose keys have a large bias."""
    if not offsets:
        return []
    layers = ", ".join(f"{layer} ({x.norm:.1f})" for layer, x in sorted(offsets.items()))
    return [
        "large key biases, stored apart where the cache is given the model; layers and norms: "
        + layers
    ]


def outlier_notes(seen: Seen) -> list[str]:
    """Return notes on layers with outlier channels in K or V."""
    notes = []
    for side in ("k", "v"):
        found = []
        for index, layer in sorted(seen.layers.items()):
            energy = getattr(layer, side)[0].float().square().mean(1)
            ratio = energy / energy.median(1, keepdim=True).values.clamp(min=1e-30)
            count = int((ratio > OUTLIER).sum())
            if count:
                found.append(f"{index} ({count}, {float(ratio.max()):.0f})")
        if found:
            notes.append(
                f"outlier channels in {side.upper()}, of more than {OUTLIER:.0f} times the median "
                f"energy; layers, how many, and the largest: {', '.join(found)}"
            )
    return notes


def plan(found: Survey, *, context: int = 32_768, budget: str = "30%") -> RecipePlan:
    """Predict the KL of specs, and make a recipe within a budget (see `recommend`).

    Layers with a bounded window stay exact and count. What allows nothing is refused.
    """
    sizes = exact_sizes(found.seen, context)
    limit = _limit(budget, sizes, found.seen, context)
    room = limit - sizes.native
    none = slot_bytes("none", found.seen, context)
    measured = measured_of(found, context, range(found.draws))
    measured.sort(key=lambda x: x.predicted)
    fitting = [x.spec for x in measured if x.bytes <= room]
    if not fitting:
        raise RecommendationError(
            f"no spec that the model's K and V allow fits into budget {budget}, {limit:,} bytes of "
            f"{sizes.exact:,} at {context} tokens; give a larger --budget"
        )
    taken = allocate(_ladders(measured, none), room)
    return RecipePlan(
        measured=tuple(measured),
        left_out=found.left_out,
        sizes=sizes,
        budget=limit,
        choice={slot: rung.spec for slot, rung in taken.items()},
        recipe_bytes=sizes.native + sum(rung.bytes for rung in taken.values()),
        recipe_predicted=_crossed(found, context, none, room),
        uniform=fitting[0],
        notes=found.notes,
        num_layers=found.seen.num_layers,
        tokens=found.tokens,
    )


def _crossed(found: Survey, context: int, none: Mapping[Slot, int], room: int) -> float:
    """Return the mean over the draws of what each predicts of the recipe that the others make."""
    kls = []
    for draw in range(found.draws):
        others = [x for x in range(found.draws) if x != draw]
        taken = allocate(_ladders(measured_of(found, context, others), none), room)
        alone = measured_of(found, context, [draw], smooth=False)
        choice = {slot: rung.spec for slot, rung in taken.items()}
        kls.append(predicted({x.spec: x for x in alone}, choice))
    return fmean(kls)


def _limit(budget: str, sizes: Sizes, seen: Seen, context: int) -> int:
    """Return the bytes of a budget, which may be a spec."""
    if not is_spec(budget):
        return budget_bytes(budget, sizes.exact)
    return sizes.native + sum(slot_bytes(budget, seen, context).values())


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
    plan: RecipePlan,
    *,
    chunk: int = 256,
    progress: Progress | None = None,
    model_name: str = "",
    text_name: str = "",
) -> Recommendation:
    """Measure the KL of a plan's recipe and of its best spec for all layers, in one run."""
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
        exact_row=False,
    )
    found = Recommendation(plan, result)
    lengths = sorted({1024, 4096, plan.sizes.context})
    return replace(found, growth=size(model.config, ["none", found.chosen], lengths))
