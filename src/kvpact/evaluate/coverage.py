"""How many of a cache's bytes are compressed at all.

Sliding windows, chunked and linear attention hold a bounded state, which stays exact. On a model
that has such layers the bits per value of the others say little about the cache as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvpact.spec import Spec


def coverage(reference: Any, cache: Any, specs: Sequence[Spec]) -> dict[str, int]:
    """Count the bytes of the exact cache, and those of them that a compressed cache takes over.

    Parameters
    ----------
    reference : DynamicCache
        The exact cache after all tokens.
    cache : CompressedCache
        The compressed one after the same tokens.
    specs : sequence of Spec
        The spec of each layer.

    Returns
    -------
    dict
        ``exact_bytes`` (the exact cache's, all layers), ``covered_bytes`` (those of K and V that
        `cache` holds by a method other than ``none``) and ``native_bytes`` (what `cache` leaves to
        transformers, its layers' states included).
    """
    from kvpact.integrations.transformers.layer import CompressedLayer

    sizes = {"exact_bytes": 0, "covered_bytes": 0, "native_bytes": 0}
    for exact, held, spec in zip(reference.layers, cache.layers, specs, strict=True):
        sizes["exact_bytes"] += sum(tensor.nbytes for tensor in _tensors(exact))
        sizes["native_bytes"] += sum(tensor.nbytes for tensor in _tensors(held))
        if isinstance(held, CompressedLayer):
            sides = ((exact.keys, spec.key), (exact.values, spec.value))
            sizes["covered_bytes"] += sum(x.nbytes for x, method in sides if method.name != "none")
    return sizes


def _tensors(layer: Any) -> Iterator[Tensor]:
    """Yield what one of transformers' layers caches: K and V, or the states of linear attention."""
    for name, value in vars(layer).items():
        if not name.startswith("_"):
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor
