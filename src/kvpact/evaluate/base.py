"""The inputs and the results of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isnan, nan
from pathlib import PurePath

from kvpact.calibration import Calibration
from kvpact.callable_package import Told
from kvpact.errors import KVPactError
from kvpact.recipe import SpecLike, is_recipe, layer_specs
from kvpact.spec import Spec, parse_spec

Progress = Callable[[float, float, str], None]
"""Called as ``progress(done, total, what)`` after each step; in proportion to time."""


class EvaluationError(KVPactError, ValueError):
    """The text, the number of tokens or the chunk does not allow an evaluation."""


@dataclass(frozen=True)
class Candidate:
    """One cache to evaluate.

    Parameters
    ----------
    source : str, Spec, path or mapping
        A spec, or a recipe (one spec a layer).
    packed_only : bool
        No exact sinks, no window, and new tokens attend to one another as stored, too.
    calibration : Calibration, optional
        What methods that learn learnt of the model; without it they learn from the text.
    sliding : str or Spec, optional
        What layers with sliding attention are packed by; they stay exact if omitted.
    budget : str, optional
        What the cache may take (see `CompressedCache`); `source` is what it begins with.
    exact_new : bool, optional
        Whether tokens of one chunk attend to one another exactly; `evaluate` lets them read as
        decoding reads if omitted (`as_decoded`), and elsewhere they do.
    """

    source: SpecLike
    packed_only: bool = False
    calibration: Calibration | None = field(default=None, compare=False, repr=False)
    sliding: str | Spec | None = None
    budget: str | None = None
    exact_new: bool | None = None

    @property
    def is_recipe(self) -> bool:
        """True if `source` is a recipe."""
        return is_recipe(self.source)

    @property
    def label(self) -> str:
        """The spec as it was given, or the name of the recipe's file."""
        if isinstance(self.source, Mapping):
            return "recipe"
        text = str(self.source).strip()
        text = PurePath(text).name if self.is_recipe else text
        if self.budget is not None:
            text = f"{text} " * (text != "none") + f"budget={self.budget}"
        return text if self.sliding is None else f"{text} sliding={self.sliding}"

    def layers(self, num_layers: int) -> list[Spec]:
        """Return the spec of every layer as it is evaluated.

        Raises `SpecError` for what is no spec or recipe, or a recipe for another number of layers.
        """
        specs = layer_specs(self.source, num_layers)
        if self.packed_only:
            return [spec.with_options(sinks=0, window=0) for spec in specs]
        return specs

    def as_decoded(self, num_layers: int, chunk: int) -> Candidate:
        """Return the candidate with `exact_new` as decoding reads, where it is not set.

        One token at a time reads those before it from slots where no window holds them exactly:
        there the tokens of a chunk read one another as stored, which is a bound for methods of
        groups: their last tokens wait exactly for the rest of a group.
        """
        specs = self.layers(num_layers)
        packed = [x for spec in specs for x in (spec.key, spec.value) if x.name != "none"]
        slots = bool(packed) and not any(method.window for method in packed)
        exact = not (self.packed_only or (slots and chunk > 1))
        return replace(self, exact_new=exact) if self.exact_new is None else self

    def sliding_spec(self) -> Spec | None:
        """Return the spec of layers with sliding attention as it is evaluated."""
        if self.sliding is None:
            return None
        spec = parse_spec(self.sliding)
        return spec.with_options(sinks=0, window=0) if self.packed_only else spec

    def spec_for_cache(self, num_layers: int) -> SpecLike:
        """Return the spec, or the specs by layer, for `CompressedCache`."""
        specs = self.layers(num_layers)
        if self.is_recipe and self.budget is not None:
            return self.source  # with its ladder
        if all(spec == specs[0] for spec in specs):
            return specs[0]
        return {"default": specs[0], "layers": dict(enumerate(specs))}


@dataclass(frozen=True)
class EvalRow(Told):
    """The result of one candidate; its fields are the keys of ``eval.json``.

    Parameters
    ----------
    spec : str
        The spec as it was given, or the name of a recipe's file.
    bits_per_value : float
        All bytes held (codes, side information, sinks, window, unused capacity) times 8, over the
        K and V numbers cached. `slot_bits_per_value` counts packed slots alone.
    bytes : int
        Bytes held at the end.
    perplexity, perplexity_change, perplexity_change_se : float
        Perplexity, its change in percent against the exact cache, and that change's paired
        standard error in percentage points.
    kl_mean, kl_median, kl_p99, kl_max : float
        KL(exact || this) of the next-token distributions, nats per token.
    top1 : float
        Percent of tokens for which both caches put the same token first.
    seconds : float
        Time of all forward passes through this cache.
    sinks, window : int
        First and last tokens that are also held exactly.
    packed_only : bool
        Whether new tokens, too, were attended as stored.
    layers_compressed, layers_native : int
        Layers held by the method, and layers left to transformers' own cache.
    fitted : bool
        Whether the method learnt from tokens, those of the first chunk.
    kl_se : float
        Standard error of `kl_mean`, tokens taken as independent. NaN for fewer than two.
    exact_bytes, covered_bytes, native_bytes : int
        Bytes of the whole exact cache after the same tokens, those of them that this cache
        compresses, and bytes of this cache that are left to transformers (see `coverage`). This
        cache as a whole has ``bytes + native_bytes``.
    exact_new : bool
        Whether tokens of one chunk attended to one another exactly, which is less than decoding
        loses where there is no window.
    share : float
        Bytes of all layers over those of the exact cache, both with exact numbers in 16 bits,
        whatever the model's dtype; room for new tokens is left out.
    """

    spec: str
    bits_per_value: float
    bytes: int
    perplexity: float
    perplexity_change: float
    kl_mean: float
    kl_p99: float
    top1: float
    seconds: float
    slot_bits_per_value: float
    kl_median: float
    kl_max: float
    perplexity_change_se: float
    sinks: int
    window: int
    packed_only: bool
    layers_compressed: int
    layers_native: int
    fitted: bool = False
    kl_se: float = nan
    exact_bytes: int = 0
    covered_bytes: int = 0
    native_bytes: int = 0
    exact_new: bool = True
    share: float = nan


@dataclass(frozen=True)
class CacheScore:
    """The measurements of one cache, named as in `EvalRow`."""

    spec: str
    packed_only: bool


def row_name(row: EvalRow | CacheScore, quote: str = "") -> str:
    """Return a row's name: its spec, marked where new tokens were attended to as stored."""
    stored = " (new as stored)" if isinstance(row, EvalRow) and not row.exact_new else ""
    return f"{quote}{row.spec}{quote}" + (" (packed only)" if row.packed_only else stored)


@dataclass(frozen=True)
class EvalProtocol:
    """The conditions of a measurement: the header of a report.

    Parameters
    ----------
    tokens, chunk, scored : int
        Tokens fed, tokens a chunk, tokens that entered the metrics.
    reference_perplexity : float
        Perplexity with the exact cache over the scored tokens.
    model, text, dtype, device : str
        Names for the report.
    threads : int
        CPU threads of torch.
    seed : int
        Of what was drawn at random (tasks).
    versions : mapping
        Versions of kvpact, torch and transformers.
    """

    tokens: int
    chunk: int
    scored: int
    reference_perplexity: float
    model: str
    text: str
    dtype: str
    device: str
    threads: int
    versions: Mapping[str, str]
    seed: int = 0


def run_name(protocol: EvalProtocol) -> str:
    """Return the model and the text of a run."""
    return " on ".join(filter(None, (protocol.model, protocol.text))) or "evaluation"


def whole_share(row: EvalRow) -> str:
    """Return the bytes of all layers over those of the exact cache in 16 bits, in percent."""
    return "-" if isnan(row.share) else f"{100 * row.share:.1f}"
