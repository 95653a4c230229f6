"""The two steps of a recommendation: a plan from one pass, and its verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvpact.evaluate import evaluate
from kvpact.evaluate.base import Progress
from kvpact.evaluate.feed import Steps
from kvpact.recipe import SpecLike
from kvpact.recommend.allocate import Rung, allocate
from kvpact.recommend.base import Measured, Plan, Recommendation, RecommendationError
from kvpact.recommend.budget import budget_bytes, exact_sizes, layer_bytes
from kvpact.recommend.candidates import LADDER, candidates
from kvpact.recommend.measure import allowed, measure
from kvpact.recommend.notes import bad_notes, bias_notes, outlier_notes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_TOKENS = 192
"""Half of them are queries, and the last 64 of each are exact: fewer would code next to nothing."""
_TILE = 64


def plan(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    context: int = 32_768,
    budget: str = "30%",
    progress: Progress | None = None,
) -> Plan:
    """Rank specs by one forward pass, and make a recipe within a budget.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, in evaluation mode; left as it was.
    token_ids : Tensor
        int64 ``[N]``; some 512 are enough. Whole tiles of 64 are used.
    context : int
        Tokens at which bytes are told.
    budget : str
        What the whole cache may take at the context: a share of the exact cache of 16 bits a
        number, or bytes (see `budget_bytes`). Layers with a bounded window stay exact and count.
    progress : callable, optional
        ``progress(done, total, what)`` after each layer and spec.

    Raises
    ------
    RecommendationError
        Fewer than 192 tokens; a context or a budget that allows nothing.
    KVPactError
        A model whose attention can't be seen (see `seen_attention`).
    """
    from kvpact.integrations.transformers import key_offsets
    from kvpact.integrations.transformers.record import seen_attention

    tokens = len(token_ids) // _TILE * _TILE
    if tokens < LEAST_TOKENS:
        raise RecommendationError(
            f"{len(token_ids)} tokens are too few to tell specs apart; give a text of "
            f"{LEAST_TOKENS} or more"
        )
    seen = seen_attention(model, token_ids[:tokens])
    sizes = exact_sizes(seen, context)
    limit = budget_bytes(budget, sizes.exact)
    widths = sorted({layer.k.shape[3] for layer in seen.layers.values()})
    reasons = {spec: allowed(spec, seen) for spec in candidates(widths[-1])}
    specs = [spec for spec, reason in reasons.items() if not reason]
    ladder = [spec for spec in LADDER if spec in specs or spec == "none"]
    smallest = sum(layer_bytes(ladder[0], x, context) for x in seen.layers.values())
    if smallest + sizes.native > limit:
        raise RecommendationError(
            f"budget {budget} is {limit:,} bytes; at {context} tokens {ladder[0]} in all layers "
            f"takes {smallest + sizes.native:,} of {sizes.exact:,}; give a larger --budget"
        )
    offsets = key_offsets(model)
    steps = Steps(progress, len(specs) * len(seen.layers))
    measured, refused = measure(seen, specs, context, offsets, steps)
    measured.sort(key=lambda x: x.total)
    reasons |= refused
    by_spec = {x.spec: x for x in measured}
    ladder = [spec for spec in ladder if spec in by_spec or spec == "none"]
    room = limit - sizes.native
    fitting = [x.spec for x in measured if sum(x.layer_bytes.values()) <= room]
    if not fitting:
        raise RecommendationError(
            f"no spec that the model's K and V allow fits into budget {budget}, {limit:,} bytes; "
            "give a larger --budget"
        )
    ladders = {
        i: [_rung(spec, i, by_spec, layer_bytes("none", x, context)) for spec in ladder]
        for i, x in sorted(seen.layers.items())
    }
    taken = allocate(ladders, room)
    return Plan(
        measured=tuple(measured),
        left_out=tuple(f"{spec}: {reason}" for spec, reason in reasons.items() if reason),
        sizes=sizes,
        budget=limit,
        layers={layer: rung.spec for layer, rung in taken.items()},
        recipe_bytes=sizes.native + sum(rung.bytes for rung in taken.values()),
        uniform=fitting[0],
        notes=(*bad_notes(measured), *bias_notes(offsets), *outlier_notes(seen)),
        num_layers=seen.num_layers,
        tokens=tokens,
    )


def _rung(spec: str, layer: int, measured: dict[str, Measured], exact: int) -> Rung:
    if spec == "none":
        return Rung(spec, exact, 0.0)
    return Rung(spec, measured[spec].layer_bytes[layer], measured[spec].cost(layer))


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
