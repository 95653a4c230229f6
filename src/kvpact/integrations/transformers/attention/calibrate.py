"""Calibration of methods to a transformers model: texts run through it, layers learn from them."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kvpact.calibration import Calibration, LayerTokens, calibrate_layer
from kvpact.errors import GeometryError
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers.attention.seen import SeenLayer, seen_attention
from kvpact.integrations.transformers.model.facts import SLIDING
from kvpact.integrations.transformers.model.offsets import (
    key_layout,
    key_offsets,
    modules_named,
    rope_by_length,
    rotaries,
)
from kvpact.integrations.transformers.versions import configs_by_layer
from kvpact.integrations.weights import gathers, input_device, part_of, read_if_known
from kvpact.kernels import RowOffset
from kvpact.key_rotation import KeyRotation
from kvpact.spec import Spec

LEAST_TOKENS = 128  # of a text: with fewer there is nothing to tell channels apart by
_OUTPUTS = ("o_proj", "out_proj", "dense")


def calibrate(
    model: Any,
    texts: Sequence[Tensor],
    specs: Sequence[Spec],
    *,
    progress: Callable[[int, int, str], None] | None = None,
    fingerprint: str | None = None,
) -> Calibration:
    """Return what the methods of specs learn of a model from texts.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; left as it was.
    texts : sequence of Tensor
        int64 ``[N]`` token ids, each beginning as prompts do (with the tokenizer's first token,
        which may draw much of the attention); each is cut to the shortest one's length. Some 4,000
        tokens in all are enough, of another kind than the texts to come if these are not known.
    specs : sequence of Spec
        Those that learn nothing are left out.
    progress : callable, optional
        ``progress(done, total, what)`` after each text and layer.
    fingerprint : str, optional
        The model's, where it is known: `model_fingerprint` reads every weight.

    Returns
    -------
    Calibration
        By layer of the model; for `CompressedCache`, `PrefixCache` and `create_cache`.

    Raises
    ------
    GeometryError
        No text, or one of fewer than 128 tokens.
    SpecError
        No method of the specs learns from tokens.
    KVPactError
        A model whose attention can't be seen (see `seen_attention`).
    MismatchError
        A model whose weights can't be read.
    """
    length = min(map(len, texts), default=0)
    if length < LEAST_TOKENS:
        raise GeometryError(
            f"the shortest calibration text has {length} tokens; give texts of {LEAST_TOKENS} or "
            "more each, some 4,000 in all"
        )
    fingerprint = fingerprint or model_fingerprint(model)
    rotations, outputs, offsets = key_rotations(model), output_energies(model), key_offsets(model)
    rows: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    total = len(texts)
    more = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    for index, text in enumerate(texts):
        with seen_attention(model) as seen, torch.inference_mode():
            ids = text[None, :length].to(input_device(model))
            model(input_ids=ids, use_cache=False, **more)
        seen.check()
        for layer, held in seen.layers.items():
            rows.setdefault(layer, []).append((held.k, held.v, query_energy(held)))
        total = len(texts) + len(rows)
        if progress is not None:
            progress(index + 1, total, f"text {index + 1}")
    found = {}
    for count, layer in enumerate(sorted(rows)):
        parts = zip(*rows.pop(layer), strict=True)
        k, v, energy = (torch.cat(part).float().cpu() for part in parts)
        less = RowOffset(offsets[layer]).without(k, 0) if layer in offsets else None
        tokens = LayerTokens(k, v, energy, outputs.get(layer), rotations.get(layer), less)
        found[layer] = calibrate_layer(tokens, specs)
        if progress is not None:
            progress(len(texts) + count + 1, total, f"layer {layer}")
    return Calibration(found, fingerprint, length * len(texts))


def query_energy(seen: SeenLayer) -> Tensor:
    """Return the mean square of queries over the heads of each KV head, `[1, H_kv, T, D]` fp32."""
    queries = torch.unflatten(seen.q.float(), 1, (seen.k.shape[1], -1))
    return queries.square().mean(2)


def key_rotations(model: Any) -> dict[int, KeyRotation]:
    """Return the rotations of keys by layer, where one set of frequencies gives them."""
    config = model.config.get_text_config(decoder=True)
    data = config.to_dict()
    if rope_by_length(data) or "mrope_section" in str(data):
        return {}
    kinds = getattr(config, "layer_types", None) or []
    found = {}
    _, rotary = next(rotaries(model), (None, None))
    _, local = next(rotaries(model, "rotary_emb_local"), (None, rotary))
    for _, attention in modules_named(model, "self_attn", "attention"):
        layer, layout = getattr(attention, "layer_idx", None), key_layout(attention)
        kind = kinds[layer] if layer is not None and layer < len(kinds) else ""
        turns = local if kind == SLIDING else rotary  # before 5.0 a module for each
        name = f"{kind}_inv_freq" if hasattr(turns, f"{kind}_inv_freq") else "inv_freq"
        frequencies = read_if_known(turns, name)
        if layer is not None and layout is not None and frequencies is not None:
            found[layer] = KeyRotation.of(frequencies, layout)
    return found


def output_energies(model: Any) -> dict[int, Tensor]:
    """Return the squares of what output projections make of V's channels, `[H_kv, D_v]` a layer."""
    config = model.config.get_text_config(decoder=True)
    found, gather, part = {}, gathers(model), part_of(model)
    for parent, attention in modules_named(model, "self_attn", "attention"):
        layer = getattr(attention, "layer_idx", None)
        linear = next((x for name in _OUTPUTS if (x := getattr(attention, name, None))), None)
        weight = read_if_known(linear, "weight", (attention, parent), gather)
        if layer is None or weight is None or weight.dim() != 2:
            continue
        own = configs_by_layer(config)[layer]
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        if groups := getattr(attention, "num_key_value_groups", None):  # the layer's own
            heads = own.num_attention_heads // groups
        width = own.num_attention_heads * (getattr(attention, "head_dim", None) or 0)
        parts = width / weight.shape[1]
        if parts != 1 and (not part or width % weight.shape[1] or heads % parts):
            continue
        energy = weight.double().square().sum(0).cpu()
        found[layer] = energy.view(int(heads / parts), -1, attention.head_dim).sum(1)
    return found
