"""Budgets, and the bytes of caches at a context."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvpact.cache import planned_bytes
from kvpact.errors import KVPactError
from kvpact.files import bytes_of, share_of, size_text
from kvpact.geometry import CacheGeometry
from kvpact.integrations.sizes import size
from kvpact.recommend.base import SIDES, RecommendationError, Sizes, Slot
from kvpact.spec import Spec, is_spec, parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.attention.seen import Seen, SeenLayer

SMALLEST = "trellis:bits=2"  # of what a recipe is made of
_ITEM = 2  # bytes of an exact number


def budget_bytes(text: str, exact: int) -> int:
    """Return the bytes that a budget allows, of the exact cache's `exact`.

    `text`: a share of it (``25%``) or bytes (``4GB``, ``300MB``, ``1.5GiB``, ``1000000``).
    """
    share, text = share_of(text), text.strip()
    if share is None and not bytes_of(text) and not re.match(r"0+(\.0*)?\s*[a-zA-Z]*$", text):
        raise RecommendationError(
            f"budget {text!r} is neither a share such as 25%, nor bytes such as 4GB, nor a spec"
        )
    number = bytes_of(text) if share is None else share
    if number <= 0:
        raise RecommendationError(f"budget {text!r} leaves no room; give more than 0")
    if share is None:
        return int(number)
    if share > 1:
        raise RecommendationError(f"budget {text!r} is more than all; take 100% at most")
    return int(share * exact)


def check_budget(model: Any, text: str, context: int) -> None:
    """Raise `RecommendationError` where a budget is misspelt, or known to be too small."""
    if is_spec(text):
        return
    budget_bytes(text, 0)
    try:
        (least,) = size(model, SMALLEST, context).rows
    except KVPactError:
        return  # its shapes are seen when it runs
    if budget_bytes(text, least.exact) < least.total:
        share = f"{100 * least.total / least.exact:.1f}% of {size_text(least.exact)}"
        raise RecommendationError(
            f"budget {text} is too small at {context:,} tokens: the smallest recipe takes "
            f"{size_text(least.total)}, {share}; give more, or a share such as 25%"
        )


def layer_geometry(seen: SeenLayer, dtype: torch.dtype = torch.float16) -> CacheGeometry:
    """Return the geometry of one layer; sizes count exact numbers in 16 bits."""
    return CacheGeometry(1, seen.k.shape[1], seen.k.shape[3], seen.v.shape[3], dtype=dtype)


@cache
def _side_bytes(spec: str, side: str, shape: CacheGeometry, context: int) -> int:
    widths = {"key": shape.head_dim, "value": shape.value_dim}
    if spec == "none":
        return shape.num_kv_heads * context * _ITEM * widths[side]
    whole, none = parse_spec(spec), parse_spec("none")
    exact_values = planned_bytes(none, shape, context)["total"] * widths["value"]
    keys = planned_bytes(Spec(whole.key, none.value), shape, context)["total"]
    keys -= exact_values // sum(widths.values())
    return keys if side == "key" else planned_bytes(whole, shape, context)["total"] - keys


def slot_bytes(spec: str, seen: Seen, context: int) -> dict[Slot, int]:
    """Return the bytes of each layer's K and V with a spec, as ``kvpact size`` counts them."""
    shapes = {layer: layer_geometry(x) for layer, x in seen.layers.items()}
    return {
        (layer, side): _side_bytes(spec, side, shape, context)
        for layer, shape in shapes.items()
        for side in SIDES
    }


def exact_sizes(seen: Seen, context: int) -> Sizes:
    """Return the exact cache's bytes at a context, without what linear attention holds: little."""
    if context < 1:
        raise RecommendationError(f"context {context} is not possible; take 1 or more tokens")
    covered = sum(slot_bytes("none", seen, context).values())
    native = sum(
        x.heads * (x.key_dim + x.value_dim) * _ITEM * min(context, x.window or context)
        for x in seen.bounded.values()
    )
    return Sizes(context, covered, native)
