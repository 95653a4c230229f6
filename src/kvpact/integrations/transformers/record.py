"""One pass through a model that keeps what its attention was given: queries, K and V by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.attention import attention_forward

RECORDING = "kvpact_recording"
_COMPRESSED = ("full_attention", "hybrid")


class SeenLayer(NamedTuple):
    """What the attention of one layer was given.

    Parameters
    ----------
    q, k, v : Tensor
        `[1, H_q, T, D]`, `[1, H_kv, T, D]`, `[1, H_kv, T, D_v]`, as the layer attends to them.
    scale : float
        Factor on the logits.
    softcap : float or None
        Logits are `softcap * tanh(logits / softcap)`.
    sink_logits : Tensor or None
        `[H_q]`, one more logit per head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


class BoundedLayer(NamedTuple):
    """A layer whose cache does not grow beyond a window: heads, widths, and its tokens at most."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass
class Seen:
    """Layers that attend to all tokens, and others with K and V, by the model's layer index."""

    layers: dict[int, SeenLayer] = field(default_factory=dict)
    bounded: dict[int, BoundedLayer] = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()
    num_layers: int = 0

    def take(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Keep what one layer was given."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or not 0 <= layer < self.num_layers:
            return
        if layer not in self.wanted:
            shape = k.shape[1], k.shape[3], v.shape[3]
            self.bounded[layer] = BoundedLayer(*shape, options.get("sliding_window"))
            return
        scale = options.get("scaling")
        self.layers[layer] = SeenLayer(
            q.detach(),
            k.detach(),
            v.detach(),
            q.shape[3] ** -0.5 if scale is None else float(scale),
            options.get("softcap"),
            options.get("s_aux"),
        )


_open: ContextVar[Seen | None] = ContextVar("kvpact_seen", default=None)


def _recording(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    seen = _open.get()
    if seen is not None:
        seen.take(module, query, key, value, options)
    return attention_forward(module, query, key, value, attention_mask, **options)


@contextmanager
def _attention_of(config: Any, seen: Seen) -> Iterator[None]:
    """Let a model record into `seen`; its attention is as before afterwards, errors included."""
    AttentionInterface.register(RECORDING, _recording)
    AttentionMaskInterface.register(RECORDING, sdpa_mask)
    before, token = config._attn_implementation, _open.set(seen)
    config._attn_implementation = RECORDING
    try:
        yield
    finally:
        config._attn_implementation = before
        _open.reset(token)


def seen_attention(model: PreTrainedModel, token_ids: Tensor) -> Seen:
    """Run a model once over tokens, attending exactly, and return what its layers attended with.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder; its attention implementation is as before afterwards.
    token_ids : Tensor
        int64 ``[N]``.

    Returns
    -------
    Seen
        Every layer with full attention is in its `layers`.

    Raises
    ------
    KVPactError
        The model caches latents (MLA), no layer has full attention, or a layer computes attention
        by itself, without transformers' attention interface.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise KVPactError(
            "this model caches latents (MLA), whose logits are not those of its keys; compare "
            "specs with kvpact eval instead"
        )
    types, _ = get_layer_types_and_kwargs(config)
    wanted = frozenset(i for i, kind in enumerate(types) if kind in _COMPRESSED)
    if not wanted:
        raise KVPactError("no layer of this model has full attention; nothing can be compressed")
    seen = Seen(wanted=wanted, num_layers=len(types))
    with torch.inference_mode(), _attention_of(config, seen):
        model(input_ids=token_ids[None].to(model.device), use_cache=False)
    missing = sorted(wanted - set(seen.layers))
    if missing:
        raise KVPactError(
            f"the attention of layers {', '.join(map(str, missing))} does not go through "
            "transformers' attention interface; compare specs with kvpact eval instead"
        )
    return seen
