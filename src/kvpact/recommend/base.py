"""What a recommendation is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpact.errors import KVPactError
from kvpact.evaluate import EvalResult, EvalRow
from kvpact.recommend.verdict import verdict_of


class RecommendationError(KVPactError, ValueError):
    """A budget, a context or a number of tokens allows no recommendation."""


@dataclass(frozen=True)
class Measured:
    """One spec's statistics on every compressed layer, and its sizes.

    Parameters
    ----------
    spec : str
        For all layers.
    slot_bits : float
        Bits of packed slots per number of K and V, mean of the layers.
    layer_bytes : mapping
        Layer -> bytes at the context.
    key, value : mapping
        Layer -> S of K, and relative error of the output by V (see `ExactAttention`).
    """

    spec: str
    slot_bits: float
    layer_bytes: Mapping[int, int]
    key: Mapping[int, float]
    value: Mapping[int, float]

    def cost(self, layer: int) -> float:
        """Return what the spec costs a layer: S of K plus the error of V."""
        return self.key[layer] + self.value[layer]

    @property
    def key_mean(self) -> float:
        """Mean of S over the layers."""
        return sum(self.key.values()) / len(self.key)

    @property
    def value_mean(self) -> float:
        """Mean error of V over the layers."""
        return sum(self.value.values()) / len(self.value)

    @property
    def total(self) -> float:
        """Cost of all layers: what specs are ranked by."""
        return sum(map(self.cost, self.key))


@dataclass(frozen=True)
class Sizes:
    """Bytes of the exact cache at the context, 16 bits a number, one sequence.

    Parameters
    ----------
    context : int
        Tokens.
    covered : int
        Of layers with full attention, which are compressed.
    native : int
        Of layers with a bounded window, which stay exact.
    """

    context: int
    covered: int
    native: int

    @property
    def exact(self) -> int:
        """Bytes of all layers."""
        return self.covered + self.native


@dataclass(frozen=True)
class Plan:
    """What one pass says: ranked specs, and a recipe within the budget.

    Parameters
    ----------
    measured : tuple of Measured
        From the least cost to the largest.
    left_out : tuple of str
        Specs that the model's shapes do not allow, and why.
    sizes : Sizes
        Of the exact cache.
    budget : int
        Bytes that the whole cache may have at the context.
    layers : mapping
        Compressed layer -> spec of the recipe.
    recipe_bytes : int
        Bytes of the whole cache with the recipe.
    uniform : str
        The best spec for all layers at no more bytes than the budget.
    notes : tuple of str
        Large key biases, outlier channels, and specs that do badly on a layer.
    num_layers : int
        Layers of the model.
    tokens : int
        Tokens of the pass.
    """

    measured: tuple[Measured, ...]
    left_out: tuple[str, ...]
    sizes: Sizes
    budget: int
    layers: Mapping[int, str]
    recipe_bytes: int
    uniform: str
    notes: tuple[str, ...]
    num_layers: int
    tokens: int

    @property
    def recipe(self) -> str | dict[str, Any]:
        """The recipe for `CompressedCache`; a spec if it is the same in all layers."""
        specs = list(self.layers.values())
        default = max(dict.fromkeys(specs), key=specs.count)
        others = {str(i): spec for i, spec in self.layers.items() if spec != default}
        return {"default": default, "layers": others} if others else default

    def bytes_of(self, spec: str) -> int:
        """Return the bytes of the whole cache with a measured spec in all compressed layers."""
        found = next(x for x in self.measured if x.spec == spec)
        return sum(found.layer_bytes.values()) + self.sizes.native


@dataclass(frozen=True)
class Recommendation:
    """A plan, what was measured of its recipe and best spec, and the better one of them.

    Parameters
    ----------
    plan : Plan
        Before the evaluation.
    evaluation : EvalResult
        Rows of ``none``, of the recipe (``recipe``, if it differs between layers) and of the best
        spec for all layers.
    """

    plan: Plan
    evaluation: EvalResult

    @property
    def row(self) -> EvalRow:
        """The row with the least KL, the exact cache left out."""
        rows = [row for row in self.evaluation.rows if row.spec != "none"]
        return min(rows, key=lambda row: row.kl_mean)

    @property
    def chosen(self) -> str | dict[str, Any]:
        """The spec or recipe with the least KL."""
        return self.plan.recipe if self.row.spec == "recipe" else self.row.spec

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache at the context with what was chosen."""
        plan = self.plan
        if self.row.spec == plan.recipe or isinstance(self.chosen, dict):
            return plan.recipe_bytes
        return plan.bytes_of(self.row.spec)

    @property
    def verdict(self) -> str:
        """``lossless``, ``near-lossless``, ``visible`` or ``broken`` (see `verdict_of`)."""
        return verdict_of(self.row.kl_mean)
