"""A budget of bytes for a model's cache, less the bytes of layers that are not compressed."""

from collections.abc import Sequence
from dataclasses import replace

from kvpact.cache.budget.budget import Budget, budget_of, ladder_of
from kvpact.errors import SpecError
from kvpact.geometry import check_count
from kvpact.integrations.sizes import layers_of, planned
from kvpact.integrations.transformers.model.facts import LayerFacts
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.recipe import SpecLike, layer_specs, sensitivities

_LONG = 1 << 22  # tokens after which a window has long been full


def model_budget(
    config: PreTrainedConfig,
    facts: LayerFacts,
    amount: int | str | None,
    spec: SpecLike | None,
    rungs: Sequence[SpecLike] | None,
    context: int | None = None,
) -> Budget:
    """Return the budget of compressed layers, less others' windows and states; or `SpecError`."""
    if amount is None:
        raise SpecError("rungs and context go with a budget")
    layers, compressed = len(facts.types), facts.compressed()
    first = None if spec is None else layer_specs(spec, layers)
    order = None if spec is None else sensitivities(spec, layers)
    exact = None
    if context is not None:
        check_count("context", context, 1)
        exact = planned("none", layers_of(config), context, 1)["exact"]
    whole = budget_of(amount, ladder_of(first, rungs, layers), order, exact)
    if len(compressed) == layers:
        return whole
    chosen = tuple(tuple(rung[layer] for layer in compressed) for rung in whole.rungs)
    if order is not None:
        own = {(i, side): order[at, side] for i, at in enumerate(compressed) for side in (0, 1)}
        whole = replace(whole, sensitivity=own)
    own_bytes = {2: _own_bytes(config, "bfloat16"), 4: _own_bytes(config, "float32")}
    return replace(whole, rungs=chosen, extra=own_bytes)


def _own_bytes(config: PreTrainedConfig, dtype: str) -> int:
    """Return the bytes of a row that layers hold besides compressed K and V."""
    held = layers_of(config, dtype)
    sizes = [
        sum(shape.own_bytes(tokens, 1, held.itemsize) for shape in held.shapes)
        for tokens in (_LONG, 2 * _LONG)
    ]
    if sizes[0] != sizes[1]:
        raise SpecError(
            "layers of this model hold more with every token besides what is compressed (the "
            "keys of an index): a budget is not for it"
        )
    return sizes[0]
