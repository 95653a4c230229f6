"""Combinations of method, options and model that are known to do badly, with what was measured.

Figures are mean KL in nats per token against the exact cache, on the shipped book.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvpact.methods.base import Method
from kvpact.spec import Spec

KEY_NORM = "whose keys are normalised (QK-norm)"
KEY_BIAS = "whose keys have a large bias (Qwen2, GPT-OSS, Phi, StarCoder2, GPT-NeoX)"


@dataclass(frozen=True)
class Caution:
    """A combination of a method and a kind of `model` (empty: all), with what was measured."""

    applies: Callable[[Any], bool]
    text: str
    model: str = ""


def _bits(method: Any) -> int:
    """Return the bits of a method's codes; 16 where it has no such option."""
    return int(getattr(method, "bits", 16))


def _only_rotates(method: Any) -> bool:
    if method.name == "turboquant":
        return _bits(method) <= 4 and not (method.center or method.first)
    return method.name == "int" and method.rotate and _bits(method) <= 4


CAUTIONS = (
    Caution(
        _only_rotates,
        "a rotation spreads the few channels that hold most of the energy over all of them. On "
        "Gemma 3 270M turboquant:bits=3 has a KL of 0.089, int:bits=3,rotate=true 0.087, "
        "trellis:bits=3 0.00083; turboquant:bits=4 0.0090, trellis:bits=4 0.00019. Take trellis, "
        "which weights channels first, or turboquant with center=64,first=true (0.0078 at 3 bits)",
        KEY_NORM,
    ),
    Caution(
        lambda method: method.name in ("int", "turboquant") and _bits(method) < 8,
        "below 8 bits a bias takes the precision that all else needs. With a bias of norm 605 on "
        "random keys of width 128, the logits' errors have a standard deviation of 2.8 with "
        "int:bits=4 and of 4.9 with turboquant:bits=4; with the bias stored apart, of 0.09 and "
        "0.10. Give the cache the model, or key_offsets",
        KEY_BIAS,
    ),
    Caution(
        lambda method: method.name == "int" and not method.rotate and _bits(method) <= 4,
        "plain integers of 4 bits or fewer: on SmolLM2-135M and Gemma 3 270M int:bits=4 has a KL "
        "of 0.0026 and 0.0067, int:bits=3 0.019 and 0.036, trellis:bits=4 0.00043 and 0.00019. "
        "Take trellis:bits=4, which is smaller than int:bits=4",
    ),
    Caution(
        lambda method: method.name == "kivi" and _bits(method) <= 2,
        "on SmolLM2-135M and Gemma 3 270M kivi:bits=2 has a KL of 0.078 and 0.016, trellis:bits=2 "
        "0.013 and 0.0054 in about 0.8 bits less. Take that, or kivi:bits=4 (0.00095 and 0.00031)",
    ),
    Caution(
        lambda method: method.sinks == 0 and _bits(method) <= 4,
        "without exact first tokens (sinks=0): on Gemma 3 270M turboquant:bits=4 has a KL of 0.028 "
        "instead of 0.0090, on SmolLM2-135M turboquant:bits=3,center=64 0.040 instead of 0.0052. "
        "Take sinks=4, or a spec with the first key as a base (trellis:bits=3,sinks=0 0.0034 "
        "instead of 0.0021 on SmolLM2-135M)",
    ),
    Caution(
        lambda method: method.name in ("polarquant", "qjl"),
        "kept for comparison: on SmolLM2-135M and Gemma 3 270M polarquant has a KL of 0.0063 and "
        "0.11 at 3.9 bits, trellis:bits=3 0.0021 and 0.00083; qjl has 0.70 on SmolLM2-135M. Take "
        "trellis",
    ),
)


def cautions(spec: Spec, model: Collection[str] | None = None) -> list[str]:
    """Return what is known to do badly about a spec's keys, on kinds of `model` if given."""
    method: Method = spec.key
    found = []
    for caution in CAUTIONS:
        if not caution.applies(method) or (
            caution.model and model is not None and caution.model not in model
        ):
            continue
        about = f"on models {caution.model}, " if caution.model and model is None else ""
        found.append(about + caution.text)
    return found
