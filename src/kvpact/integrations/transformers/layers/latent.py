"""Models with latent attention (MLA: DeepSeek-V2, V3 and relatives), absorbed.

The method `expand_kv` of their attention classes is wrapped: given handles by a plain module, it
hands handles on, and attention goes over the latents. Everything else passes through unchanged.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.integrations.transformers.held.handles import KVHandle, refuse_gradients
from kvpact.integrations.transformers.held.new_tokens import NewTokens
from kvpact.integrations.transformers.versions import modeling_module
from kvpact.kernels import absorb_query, expand_output

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_PROBES = 3  # random tokens on which an `expand_kv` is compared with what absorption assumes


class HeadTokens:
    """The tokens of one `update`, which are latents, as K and V of the heads, made when read."""

    fresh = False  # they are handed on once the latents are stored

    def __init__(self, origin: NewTokens, module: Any, expand: Expand) -> None:
        self.origin, self._module, self._expand = origin, module, expand
        self._parts: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the latents, absorbed: `[B, H, S, d_nope + d_rope]` to `[B, H, S, d_v]`."""
        w_uk, w_uv = _weights(self._module)
        nope = w_uk.shape[1]
        rope = q[..., nope:]
        if not rope.shape[3]:
            rope = q.new_zeros(*q.shape[:3], 1)  # as it is stored
        query = absorb_query(q[..., :nope], rope, w_uk)
        return expand_output(self.origin.attend(query, config), w_uv)

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of the heads, made of decompressed latents."""
        if self._parts is None:
            latents, rope = self.origin.part("k"), self.origin.part("v")
            self._parts = self._expand(latents, rope)
        return self._parts[0 if side == "k" else 1]


def hand_on(config: Any) -> None:
    """Make the attention classes of a decoder config's model hand handles on."""
    for attention in list(vars(sys.modules.get(modeling_module(config)) or object).values()):
        if isinstance(attention, type):
            meet(attention)


def meet(attention: type) -> None:
    """Make a class's `expand_kv`, if it has one, hand handles on; once per class."""
    original = vars(attention).get("expand_kv")
    if original is None or hasattr(original, "kvpact"):
        return

    @functools.wraps(original)
    def expand_kv(module: Any, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(latents, KVHandle) or not isinstance(rope, KVHandle):
            k, v = original(module, latents, rope)
            return k, v
        expand = functools.partial(original, module)
        fresh = latents.pending.fresh
        if not fresh and _is_plain(module, expand):
            return _handed_on(module, expand, latents, rope)
        k, v = expand(latents, rope)
        if fresh:
            latents.pending.read_as(k)
        return k, v

    expand_kv.kvpact = True  # type: ignore[attr-defined]
    attention.expand_kv = expand_kv  # type: ignore[attr-defined]


def meet_class(module: Any) -> None:
    """Call `meet` for the classes of an attention layer."""
    if hasattr(type(module), "expand_kv"):  # of a module it takes long to say no
        for attention in type(module).__mro__:
            meet(attention)


def _handed_on(
    module: Any, expand: Expand, latents: KVHandle, rope: KVHandle
) -> tuple[KVHandle, KVHandle]:
    tokens = HeadTokens(latents.pending, module, expand)
    batch, _, total, _ = latents.shape
    w_uk, w_uv = _weights(module)
    heads, nope, _ = w_uk.shape
    k, v = (
        KVHandle.of(tokens, side, (batch, heads, total, width), latents)
        for side, width in (("k", nope + rope.shape[-1]), ("v", w_uv.shape[1]))
    )
    if latents.requires_grad:
        refuse_gradients(k), refuse_gradients(v)
    return k, v


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return W_UK `[H, d_nope, r]` and W_UV `[H, d_v, r]` of an attention layer."""
    nope, v_dim = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight.detach()
    per_head = weight.view(-1, nope + v_dim, weight.shape[1])
    return per_head[:, :nope], per_head[:, nope:]


_seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_plain(module: Any, expand: Expand) -> bool:
    """Return whether `expand_kv` is as absorption assumes: one linear layer, no bias, no hooks."""
    names = ("kv_b_proj", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")
    if not all(hasattr(module, name) for name in names):
        return False
    projection = module.kv_b_proj
    if type(projection) is not torch.nn.Linear or getattr(projection, "bias", None) is not None:
        return False
    if projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection):
        return False
    weight = projection.weight
    known = type(weight) in (Tensor, torch.nn.Parameter)  # others have numbers of their own
    if (
        not known
        or weight.is_meta
        or weight.shape[0] % (module.qk_nope_head_dim + module.v_head_dim)
    ):
        return False
    if module not in _seen:
        _seen[module] = _expands_plainly(module, expand)
    return _seen[module]


def _expands_plainly(module: Any, expand: Expand) -> bool:
    weight = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 1, _PROBES, weight.shape[1]), (1, 1, _PROBES, module.qk_rope_head_dim))
    latents, rope = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(weight)
        for shape in shapes
    )
    with torch.no_grad():
        k, v = expand(latents, rope)
        w_uk, w_uv = _weights(module)
        wanted_k = torch.cat([latents @ w_uk.mT, rope.expand(-1, w_uk.shape[0], -1, -1)], dim=-1)
        wanted_v = latents @ w_uv.mT
    return all(
        x.shape == y.shape and bool((x - y).float().norm() <= 0.02 * y.float().norm())
        for x, y in ((k, wanted_k), (v, wanted_v))
    )
