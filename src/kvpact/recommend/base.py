"""The parts of a recommendation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from statistics import geometric_mean
from typing import Any

from kvpact.callable_package import Told
from kvpact.errors import KVPactError
from kvpact.evaluate import Difference, EvalResult, EvalRow, TaskResult, TaskRow, differences
from kvpact.evaluate.canvas import INK, new_figure
from kvpact.evaluate.text import kl_text, verdict_of
from kvpact.files import aligned, size_text
from kvpact.integrations.sizes import SizeResult

SIDES = ("key", "value")
Slot = tuple[int, str]  # a layer, and ``key`` or ``value``


class RecommendationError(KVPactError, ValueError):
    """A budget, a context or a number of tokens allows no recommendation."""


@dataclass(frozen=True)
class Measured:
    """The costs of one spec on every compressed layer, and its sizes.

    Parameters
    ----------
    spec : str
        For all layers.
    slot_bits : float
        Bits of packed slots per number of K and V, mean of the layers.
    key_bytes, value_bytes : mapping
        Layer -> bytes of K and of V at the context.
    key, noise : mapping
        Layer -> what errors of K and of V cost one by one, in nats per token (see
        `Sensitivity.noise`).
    shrunk : mapping
        Layer -> what is squared once all layers are added up (see `Sensitivity.shrunk`).
    """

    spec: str
    slot_bits: float
    key_bytes: Mapping[int, int]
    value_bytes: Mapping[int, int]
    key: Mapping[int, float]
    noise: Mapping[int, float]
    shrunk: Mapping[int, float]

    @property
    def bytes(self) -> int:
        """Bytes of all compressed layers at the context."""
        return sum(self.key_bytes.values()) + sum(self.value_bytes.values())

    @property
    def value(self) -> dict[int, float]:
        """Layer -> what V costs if all layers have this spec, in nats per token."""
        whole = sum(self.shrunk.values())
        return {layer: noise + self.shrunk[layer] * whole for layer, noise in self.noise.items()}

    @property
    def predicted(self) -> float:
        """Predicted mean KL with this spec in all layers, in nats per token."""
        return sum(self.key.values()) + sum(self.value.values())


@dataclass(frozen=True)
class Sizes:
    """Bytes of a sequence's exact 16-bit cache: `covered`: compressed; `native`: of windows."""

    context: int
    covered: int
    native: int

    @property
    def exact(self) -> int:
        """Bytes of all layers."""
        return self.covered + self.native


def predicted(measured: Mapping[str, Measured], choice: Mapping[Slot, str]) -> float:
    """Return the mean KL that a choice of measured specs, or ``none``, is predicted to have."""
    noise = shrunk = 0.0
    for (layer, side), spec in choice.items():
        if spec == "none":
            continue
        one = measured[spec]
        noise += (one.key if side == "key" else one.noise)[layer]
        shrunk += one.shrunk[layer] if side == "value" else 0.0
    return noise + shrunk**2


@dataclass(frozen=True)
class RecipePlan:
    """The predictions for specs, and a recipe within the budget.

    Parameters
    ----------
    measured : tuple of Measured
        From the least predicted KL to the largest.
    left_out : tuple of str
        Specs that the model's shapes do not allow, and why.
    sizes : Sizes
        Of the exact cache.
    budget : int
        Bytes that the whole cache may have at the context.
    choice : mapping
        Compressed layer and side -> spec of the recipe.
    recipe_bytes : int
        Bytes of the whole cache with the recipe.
    recipe_predicted : float
        Predicted mean KL with the recipe, in nats per token: mean over the draws of what a draw
        says of the recipe that the others make, so that no draw is praised for its own errors.
    uniform : str
        The spec for all layers of least predicted KL at no more bytes than the budget.
    notes : tuple of str
        Large key biases and outlier channels.
    num_layers : int
        Layers of the model.
    tokens : int
        Tokens of the text that predictions are for.
    """

    measured: tuple[Measured, ...]
    left_out: tuple[str, ...]
    sizes: Sizes
    budget: int
    choice: Mapping[Slot, str]
    recipe_bytes: int
    recipe_predicted: float
    uniform: str
    notes: tuple[str, ...]
    num_layers: int
    tokens: int

    @property
    def layers(self) -> dict[int, str]:
        """Compressed layer -> spec of the recipe, K and V apart where they differ."""
        found = {}
        for layer in sorted({layer for layer, _ in self.choice}):
            key, value = (self.choice[layer, side] for side in SIDES)
            found[layer] = key if key == value else f"{key}/{value}"
        return found

    @property
    def recipe(self) -> str | dict[str, Any]:
        """The recipe for `CompressedCache`; a spec if it is the same in all layers."""
        specs = list(self.layers.values())
        default = max(dict.fromkeys(specs), key=specs.count)
        others = {str(i): spec for i, spec in self.layers.items() if spec != default}
        return {"default": default, "layers": others} if others else default

    @property
    def ladder(self) -> dict[str, list[float]]:
        """The cost of a distortion in K and V of each layer (see `kvpact.recipe.sensitivities`).

        Read off the smallest spec of a recipe, where it is largest; 1 is the mean.
        """
        least = min((x for x in self.measured if "trellis" in x.spec), key=lambda x: x.slot_bits)
        costs = least.key, least.value
        mean = sum(map(sum, (x.values() for x in costs))) / (2 * len(least.key)) or 1.0
        layers = range(self.num_layers)
        return {
            side: [float(f"{cost.get(layer, 0.0) / mean:.3g}") for layer in layers]
            for side, cost in zip(SIDES, costs, strict=True)
        }

    def of(self, spec: str) -> Measured:
        """Return the measurements of a spec."""
        return next(x for x in self.measured if x.spec == spec)

    def bytes_of(self, spec: str) -> int:
        """Return the bytes of the whole cache with a measured spec in all compressed layers."""
        return self.of(spec).bytes + self.sizes.native


@dataclass(frozen=True, repr=False)
class Recommendation(Told):
    """A plan, what was measured of its recipe and best spec, and the better one of them.

    `print` shows the answer, the line of Python to write, and what was compared.

    Parameters
    ----------
    plan : RecipePlan
        Before the evaluation.
    evaluation : EvalResult
        Rows of the recipe (``recipe``, if it differs between layers) and of the best spec for all
        layers.
    growth : SizeResult, optional
        Bytes of an exact cache and of what was chosen, as a text grows.
    tools : TaskResult or str
        Calls of tools with what was chosen, whose arguments are copied from earlier tokens; or why
        they were not measured.
    """

    plan: RecipePlan
    evaluation: EvalResult
    growth: SizeResult | None = None
    tools: TaskResult | str = "not asked for"

    def __repr__(self) -> str:
        return f"{self.answer}\n{self.line()}\n\n{self.table}"

    @property
    def answer(self) -> str:
        """The verdict, the measured KL, arguments of tool calls where lost, and the bytes."""
        size, exact = size_text(self.bytes), self.plan.sizes.exact
        lost = ", it copies fewer ids and numbers into tool calls than the exact cache" * self.lost
        return (
            f"{self.verdict}: KL {kl_text(self.row.kl_mean)}{lost}, {size} of {size_text(exact)} "
            f"at {self.plan.sizes.context:,} tokens ({100 * self.bytes / exact:.1f} % of an exact "
            "16-bit cache)"
        )

    def line(self, recipe: PathLike[str] | None = None) -> str:
        """Return the line of Python that makes the cache; `recipe` is the file of its recipe."""
        source = str(recipe) if recipe and isinstance(self.chosen, dict) else self.chosen
        return f"CompressedCache(model, {source!r})"

    @property
    def table(self) -> str:
        """The table of what was compared, and of bytes as a text grows."""
        lines = [["spec", "slot bits", "bytes", "KL predicted", "calibrated", "measured"]]
        kl = {row.spec: kl_text(row.kl_mean) for row in self.evaluation.rows}
        for spec in [x.spec for x in self.plan.measured] + ["recipe"] * ("recipe" in kl):
            own = self.plan.recipe_bytes if spec == "recipe" else self.plan.bytes_of(spec)
            bits = "-" if spec == "recipe" else f"{self.plan.of(spec).slot_bits:.2f}"
            kls = (self.predicted_of(spec), self.calibrated(spec))
            lines.append([spec, bits, size_text(own), *map(kl_text, kls), kl.get(spec, "-")])
        return "\n\n".join((aligned(lines), *([repr(self.growth)] if self.growth else [])))

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what K and V of each layer cost with each spec, and what was chosen (PNG, SVG)."""
        costs = {x.spec: (x.key, x.value) for x in self.plan.measured}
        recipe = isinstance(self.chosen, dict)
        choice = {slot: x if recipe else self.row.spec for slot, x in self.plan.choice.items()}
        _save_heat_map(costs, choice, path)

    @property
    def row(self) -> EvalRow:
        """The row with the least KL, the exact cache left out."""
        rows = [row for row in self.evaluation.rows if row.spec != "none"]
        return min(rows or self.evaluation.rows, key=lambda row: row.kl_mean)

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

    def predicted_of(self, spec: str) -> float:
        """Return the predicted mean KL of a measured spec, or of ``recipe``."""
        if spec in ("recipe", self.plan.recipe):
            return self.plan.recipe_predicted
        return self.plan.of(spec).predicted

    def calibrated(self, spec: str) -> float:
        """Return a prediction at the level that the evaluation found.

        It is multiplied by the measured KL over the predicted one, of whatever was evaluated but
        itself (geometric mean): what predictions leave out is much the same for all specs.
        `spec` is a measured one, or ``recipe``.
        """
        own = self.predicted_of(spec)
        ratios = [
            row.kl_mean / self.predicted_of(row.spec)
            for row in self.evaluation.rows
            if row.spec not in ("none", spec) and self.predicted_of(row.spec) > 0 < row.kl_mean
        ]
        return own * geometric_mean(ratios) if ratios else own

    @property
    def against_uniform(self) -> Difference | None:
        """The recipe against the best spec for all layers, token by token; None if it is one."""
        names = [row.spec for row in self.evaluation.rows]
        if "recipe" not in names or self.plan.uniform not in names:
            return None
        found = differences(self.evaluation, self.plan.uniform)
        return next(x for x in found if x.spec == "recipe")

    @property
    def kept(self) -> TaskRow | None:
        """The scores of the arguments of tool calls; None if they were not measured."""
        return None if isinstance(self.tools, str) else self.tools.rows()[-1]

    @property
    def lost(self) -> bool:
        """True if arguments of tool calls are lost: more than two standard errors of them."""
        kept = self.kept
        return kept is not None and kept.exact_correct - kept.correct > 2 * kept.change_se

    @property
    def verdict(self) -> str:
        """A word of `VERDICTS`; ``visible`` at best where arguments of tool calls are lost."""
        verdict = verdict_of(self.row.kl_mean, self.evaluation.protocol.scored)
        return "visible" if self.lost and verdict != "broken" else verdict


def _save_heat_map(
    costs: Mapping[str, Sequence[Mapping[int, float]]],
    choice: Mapping[Slot, str],
    path: str | PathLike[str],
) -> None:
    """Draw costs in nats, of K and V (spec -> layer -> KL), to a PNG, SVG or PDF; dots: chosen."""
    figure = new_figure((11, 7))
    from matplotlib.colors import LogNorm

    specs, layers = list(costs), sorted(next(iter(costs.values()))[0])
    known = [x for pair in costs.values() for side in pair for x in side.values() if x > 0]
    norm = LogNorm(min(known, default=0.1), max(known, default=1.0))
    for place, side in enumerate(SIDES):
        axes: Any = figure.add_subplot(2, 1, place + 1)
        grid = [[costs[spec][place][layer] for layer in layers] for spec in specs]
        image = axes.imshow(grid, norm=norm, cmap="YlOrRd", aspect="auto")
        dots = [(layers.index(at), specs.index(spec)) for (at, of), spec in choice.items()
                if of == side and spec in costs]  # fmt: skip
        axes.plot(*zip(*dots, strict=True), "o", color=INK, ms=4) if dots else None
        axes.set_title(f"{'KV'[place]}; dots: what was chosen", loc="left", fontsize=11, color=INK)
        axes.set_xticks(range(len(layers)), layers)
        axes.set_yticks(range(len(specs)), specs, fontsize=8)
    axes.set_xlabel("layer")
    figure.colorbar(image, ax=figure.axes, label="predicted KL, nats per token")
    figure.savefig(path, bbox_inches="tight")
