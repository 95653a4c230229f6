"""Passes through a model that show what its attention is given, and may change K and V."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.attention.forward import attention_forward
from kvpact.integrations.transformers.attention.plain import needs_own
from kvpact.integrations.transformers.model.facts import layer_facts

SHOWN = "kvpact_shown"

ReadTokens = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called as ``read(layer, k, v)``; returns the K and V that the layer attends to instead."""


class SeenLayer(NamedTuple):
    """The tensors given to a layer's attention: `q` of the new tokens, `k` and `v` of all."""

    q: Tensor
    k: Tensor
    v: Tensor


class BoundedLayer(NamedTuple):
    """A layer whose cache does not grow beyond a window: heads, widths, and its tokens at most."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass
class Seen:
    """The latest pass: `layers` that attend to all tokens (`wanted`), and `bounded` ones."""

    layers: dict[int, SeenLayer] = field(default_factory=dict)
    bounded: dict[int, BoundedLayer] = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()
    num_layers: int = 0
    read: ReadTokens | None = None  # what `layers` attend to

    def take(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Keep the queries, K and V of one layer; return the K and V that it attends to."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or not 0 <= layer < self.num_layers:
            return k, v
        if layer not in self.wanted:
            shape = k.shape[1], k.shape[3], v.shape[3]
            self.bounded[layer] = BoundedLayer(*shape, options.get("sliding_window"))
            return k, v
        self.layers[layer] = SeenLayer(q.detach(), k.detach(), v.detach())
        return (k, v) if self.read is None else self.read(layer, k, v)

    def check(self) -> None:
        """Raise `KVPactError` where a layer was not seen."""
        missing = sorted(self.wanted - set(self.layers))
        if missing:
            raise KVPactError(
                f"the attention of layers {', '.join(map(str, missing))} does not go through "
                "transformers' attention interface; compare specs with kvpact eval instead"
            )


_open: ContextVar[Seen | None] = ContextVar("kvpact_seen", default=None)


def _shown(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    seen = _open.get()
    if seen is not None:
        key, value = seen.take(module, query, key, value, options)
    if torch.is_grad_enabled() and needs_own(options):
        return _with_gradients(query, key, value, attention_mask, options), None
    return attention_forward(module, query, key, value, attention_mask, **options)


def _with_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attend where ``sdpa`` can't; kvpact's own attention overwrites what gradients need."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale, cap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    logits = q.float() @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    if options.get("position_bias") is not None:
        logits = logits + options["position_bias"]
    if mask is None:
        key = torch.arange(k.shape[2], dtype=torch.int64, device=k.device)
        query = key[k.shape[2] - q.shape[2] :, None]
        mask = (key <= query) & (key > query - (options.get("sliding_window") or len(key)))
    if mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    else:
        logits = logits + mask
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    output: Tensor = (weights @ v).to(q.dtype)
    return output.transpose(1, 2).contiguous()


def full_attention_layers(model: PreTrainedModel) -> frozenset[int]:
    """Return the layers that attend to all tokens. Raises `KVPactError`."""
    config = model.config.get_text_config(decoder=True)
    facts = layer_facts(config)
    if facts.latent_widths:
        raise KVPactError(
            "this model caches latents (MLA), whose logits are not those of its keys; compare "
            "specs with kvpact eval instead"
        )
    return frozenset(facts.compressed())


@contextmanager
def seen_attention(model: PreTrainedModel) -> Iterator[Seen]:
    """Show exact attention in `Seen` during the context, but for what `Seen.read` puts in."""
    wanted, config = full_attention_layers(model), model.config.get_text_config(decoder=True)
    AttentionInterface.register(SHOWN, _shown)
    AttentionMaskInterface.register(SHOWN, sdpa_mask)
    seen = Seen(wanted=wanted, num_layers=config.num_hidden_layers)
    before, token = config._attn_implementation, _open.set(seen)
    config._attn_implementation = SHOWN
    try:
        yield seen
    finally:
        config._attn_implementation = before
        _open.reset(token)
