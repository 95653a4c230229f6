"""Scores from outside, such as kvpress' presses, by which a cache keeps some of its tokens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.versions import given_cache


@contextmanager
def pressed(model: PreTrainedModel, cache: CompressedCache, press: Any) -> Iterator[None]:
    """Score the tokens of one call of the model, and keep the best of them at the end.

    Every head of every compressed layer keeps ``1 - press.compression_ratio`` of its tokens. Which
    press suits a model has to be measured: none is best on all.

    Parameters
    ----------
    model : PreTrainedModel
        With attention modules that have a `layer_idx`.
    cache : CompressedCache
        Empty; the call inside the ``with`` fills it.
    press : ScorerPress
        Of kvpress, or anything with `compression_ratio` and
        ``score(module, hidden_states, keys, values, attentions, kwargs)`` -> `[B, H_kv, T]`.

    Raises
    ------
    KVPactError
        The press has no scores; the cache holds tokens already; no call scored all layers.
    GeometryError, SpecError
        As `CompressedCache.compact`.

    Examples
    --------
    >>> with pressed(model, cache, KnormPress(0.3)):
    ...     model(input_ids, cache=cache)
    """
    ratio = getattr(press, "compression_ratio", None)
    if not callable(getattr(press, "score", None)) or not isinstance(ratio, int | float):
        raise KVPactError(
            f"{type(press).__name__} has no score() and compression_ratio: take a press that does, "
            "or call cache.compact() with the tokens that it keeps"
        )
    if cache.get_seq_length():
        raise KVPactError("the cache holds tokens already: only those of a first call are scored")
    layers = (i for i, layer in enumerate(cache.layers) if isinstance(layer, CompressedLayer))
    wanted = {i: n for n, i in enumerate(layers)}
    found: dict[int, Tensor] = {}

    def score(module: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        layer: Any = cache.layers[module.layer_idx]
        if given_cache(given) is not cache or module.layer_idx not in wanted:
            return
        hidden = given["hidden_states"] if "hidden_states" in given else args[0]
        scores = press.score(module, hidden, layer.keys, layer.values, output[1], given)
        count = max(1, int(scores.shape[-1] * (1 - ratio)))
        best = scores.topk(count, dim=-1).indices.sort(-1).values
        found[wanted[module.layer_idx]] = best.to("cpu", torch.int64)

    with ExitStack() as hooks:
        for module in model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
                hooks.enter_context(module.register_forward_hook(score, with_kwargs=True))
        yield
    if set(found) != set(wanted.values()):
        raise KVPactError("no call of the model with this cache went through all of its layers")
    cache.compact(torch.stack([found[n] for n in sorted(found)]))
