"""Quality over the length of a context: caches with a budget of bytes, and others that fit it.

KL over position is measured on the text. What is remembered is measured by needles in a second
text, one in each stretch: at its end all that came so far are asked for, on copies of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvpact.errors import BudgetExceeded
from kvpact.evaluate.base import Candidate, EvaluationError, Progress
from kvpact.evaluate.canvas import COLOURS, INK, MUTED, legend, log_ticks
from kvpact.evaluate.feed import Steps, chunks, compressed_cache, forward, positions
from kvpact.evaluate.metrics import mean_and_error, score_tokens
from kvpact.evaluate.task_scores import Asked, answers, prepared
from kvpact.evaluate.task_source import token_counter
from kvpact.evaluate.tasks import TaskCase, make_cases
from kvpact.evaluate.text import kl_text
from kvpact.integrations.models import first_tokens
from kvpact.integrations.sizes import size
from kvpact.integrations.weights import input_device
from kvpact.recipe import SpecLike, sensitivities

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STRETCHES, FEWEST = 6, 4
"""Stretches that a text is reported in, and chunks that one has at least."""
CHUNK = 64
"""Tokens that a cache with a budget always takes at a time, while they fit."""
UNIFORM = ("none", "int:bits=8", *(f"trellis:bits={bits}" for bits in (6, 5, 4, 3, 2)))
"""Specs for all layers, from the most bytes to the fewest, one of which may fit a budget."""
EXACT = "exact cache"
EXACT_KL = 1e-6  # nats; what is less is the rounding of other sums, and no plot shows it

Make = Callable[[], Any]


@dataclass(frozen=True)
class GrowthPoint:
    """A cache at the end of a stretch."""

    tokens: int
    kl: float  # of the stretch's tokens, nats; NaN where they did not fit
    kl_se: float  # its standard error
    needle: float  # log-probability of the needles so far, less the exact cache's
    needle_se: float
    bytes: int
    bits: float | None  # of a cache with a budget: mean bits of packed numbers


@dataclass(frozen=True)
class GrowthRow:
    """A cache over the length: its name, the end of each stretch, and KL chunk by chunk."""

    name: str
    points: tuple[GrowthPoint, ...]
    kl: tuple[float, ...]


@dataclass(frozen=True)
class GrowthResult:
    """Caches over the length of one text, and how they were measured."""

    rows: tuple[GrowthRow, ...]
    model: str
    text: str
    dtype: str
    tokens: int
    chunk: int
    needles: int
    seed: int

    def table(self, what: str) -> tuple[list[str], list[list[str]]]:
        """Return columns and lines of ``kl``, ``needle``, ``bits`` or ``bytes`` over the length."""
        lines = []
        for row in self.rows:
            values = [getattr(point, what) for point in row.points]
            if any(value is not None for value in values):
                lines.append([row.name, *(_text(what, value) for value in values)])
        ends = (f"{point.tokens:,}" for point in self.rows[0].points)
        return [TITLES[what], *ends], lines

    def about(self) -> str:
        """Return how it was measured, in a few sentences."""
        return (
            f"{self.tokens:,} tokens in chunks of {self.chunk}; KL in nats per token, mean of the "
            f"stretch that ends there, the first chunk left out. Needle: log-probability of "
            f"{self.needles} answers so far at the most, less the exact cache's, in another text "
            f"of that length (seed {self.seed}). Bits: of packed numbers, of caches with a budget; "
            "MB: all layers. -: did not fit."
        )

    @property
    def name(self) -> str:
        """The model and the text."""
        return " on ".join(filter(None, (self.model, self.text))) or "growth"


TITLES = {"kl": "KL", "needle": "needle", "bits": "bits", "bytes": "MB"}


def _text(what: str, value: float | None) -> str:
    if value is None or value != value:
        return "-"
    texts = {"kl": kl_text(value), "needle": f"{value:+.2f}", "bits": f"{value:.2f}"}
    return texts.get(what, f"{value / 1e6:.2f}")


@dataclass(frozen=True)
class GrowthPanel:
    """KL or needles over the length, as a panel of a plot."""

    result: GrowthResult
    what: str
    margin: ClassVar[float] = 0.6
    height: ClassVar[float] = 4.2
    x_label: ClassVar[str] = "tokens"

    def draw(self, axes: Any, run: str) -> None:
        """Draw a line a cache."""
        kl, points = self.what == "kl", [row.points for row in self.result.rows]
        if kl:
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
        label = "KL, nats per token" if kl else "log-probability less the exact cache's"
        axes.set_ylabel(label, color=INK)
        axes.set_title(run, loc="left", fontsize=11, color=INK)
        for index, (row, own) in enumerate(zip(self.result.rows, points, strict=True)):
            x = [point.tokens for point in own]
            y = [getattr(point, self.what) or nan for point in own]
            style = {"color": COLOURS[index % len(COLOURS)], "lw": 1.8, "label": row.name}
            axes.plot(x, y, "o-", ms=5, **style)
        axes.set_xlim(left=0)
        if kl and axes.get_ylim()[0] < EXACT_KL:
            axes.set_ylim(bottom=EXACT_KL)
        legend(axes, labelcolor=MUTED)


def contenders(
    model: PreTrainedModel, budgets: Sequence[str], specs: Sequence[SpecLike], tokens: int
) -> dict[str, Make]:
    """Return makers of caches by name: with each budget, what fits it, 2 bits, and `specs`."""
    from kvpact.evaluate.recent import SINKS, recent_cache

    dtype = str(model.dtype).removeprefix("torch.")
    found: dict[str, Make] = {}

    def add(candidate: Candidate) -> None:
        found.setdefault(candidate.label, lambda: compressed_cache(model, candidate))

    held = size(model.config, list(UNIFORM), [tokens], dtype=dtype).rows
    own, exact = held[0].own, held[0].total - held[0].own
    for budget in budgets:
        add(Candidate("none", budget=budget))
    for budget in budgets:
        room = compressed_cache(model, Candidate("none", budget=budget)).stats()["budget"]["bytes"]
        fits = next((row.spec for row in held if row.total <= room), None)
        if fits is not None:
            add(Candidate(fits))
        most = (room - own) * tokens // exact
        if SINKS < most < tokens:
            name = f"exact, last {most:,} tokens ({budget})"
            found[name] = lambda most=most: recent_cache(model.config, most)  # type: ignore[misc]
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for spec in (UNIFORM[-1], *specs):
        ladder = sensitivities(spec, layers) is not None
        for each in budgets if ladder else (None,):
            add(Candidate(spec, budget=each))
    return found


@dataclass
class _CacheRun:
    """One cache on its way through a text."""

    cache: Any
    held: int = 0
    full: bool = False
    kl: list[Tensor] = field(default_factory=list)
    facts: list[tuple[int, float | None]] = field(default_factory=list)
    found: list[list[float]] = field(default_factory=list)

    def forward(self, model: PreTrainedModel, ids: Tensor) -> Tensor | None:
        """Feed tokens; return logits, None where they do not fit any more."""
        if self.full:
            return None
        try:
            logits = forward(model, ids, self.cache)
        except BudgetExceeded:
            self._check_full(len(ids))
            self.full = True
            return None
        self.held += len(ids)
        return logits

    def answers(self, model: PreTrainedModel, asked: Asked, chunk: int) -> list[float]:
        """Return the log-probabilities of answers; none where there is no room for questions."""
        try:
            return [] if self.full else [x for x, _ in answers(model, self.cache, asked, chunk)]
        except BudgetExceeded:
            self._check_full(max(len(ids) for ids, _ in asked))
            return []

    def _check_full(self, new: int) -> None:
        """Raise the error at hand again unless it is that so many tokens more can't fit."""
        if self.held + new <= self.cache.stats()["budget"].get("max_tokens", self.held + new):
            raise

    def measure(self) -> None:
        """Note the bytes held, and the bits of a budget."""
        from kvpact.integrations.transformers.engine_cache import tensors_of

        if hasattr(self.cache, "memory_usage"):
            bits = self.cache.stats().get("budget", {}).get("bits")
            self.facts.append((self.cache.memory_usage(), bits))
        else:
            held = (x for layer in self.cache.layers for x in tensors_of(layer))
            self.facts.append((sum(x.nbytes for x in held), None))


def grow(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    budgets: Sequence[str],
    specs: Sequence[SpecLike] = (),
    *,
    tokens: int = 2048,
    chunk: int = CHUNK,
    samples: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
    model_name: str = "",
    text_name: str = "",
) -> GrowthResult:
    """Measure caches with budgets over the length of a context, and what else would fit.

    Next to each budget stand the best spec for all layers that fits at the end, and an exact cache
    of the first and the last tokens in the same bytes; and 2 bits for all layers.

    Parameters
    ----------
    model, tokenizer, text, tokens, seed, progress, model_name, text_name
        See `evaluate_text`; `seed` is that of the needles.
    budgets : sequence of str
        Such as ``24MB`` (see `create_cache`).
    specs : sequence of specs
        Other caches; recipes with a ``ladder`` have each of the budgets.
    chunk : int
        Tokens fed at a time; the first chunk is left out of every metric.
    samples : int
        Texts with needles.

    Raises
    ------
    EvaluationError
        Too few tokens, or more than the model has positions.
    BudgetExceeded
        A budget has no room for a few tokens, or none for chunks of that size.
    SpecError
        A budget or a spec is none.
    """
    limit = positions(model)
    if chunk < 1 or tokens < 2 * FEWEST * chunk or (limit is not None and tokens > limit):
        raise EvaluationError(
            f"{tokens} tokens in chunks of {chunk} show no growth; take {2 * FEWEST * chunk} or "
            f"more, and no more than the model's {limit} positions"
        )
    ids = first_tokens(tokenizer, text, tokens)
    makers = contenders(model, budgets, specs, len(ids))
    parts = min(STRETCHES, -(-len(ids) // chunk) // FEWEST)
    ends = _ends(len(ids), chunk, parts)
    depths = [(i + 0.5) / len(ends) for i in range(len(ends))]
    room = min(tokens, (limit or tokens) - CHUNK)  # for a question after it
    drawn: dict[str, Any] = {
        "depths": depths,
        "samples": samples,
        "seed": seed,
        "tasks": ("needle",),
    }
    cases = make_cases(text, token_counter(tokenizer), tokens=room, **drawn)
    steps = Steps(progress, (1 + samples) * (1 + len(makers)) * -(-len(ids) // chunk))
    with torch.inference_mode():
        runs = _start(model, makers)
        for start, targets, logits in _lockstep(model, ids, runs, chunk, steps):
            exact = logits.pop(EXACT)
            assert exact is not None
            for name, mine in logits.items():
                if start and mine is not None and (n := len(targets)):
                    runs[name].kl.append(score_tokens(exact[:n], mine[:n], targets).kl)
            if min(start + chunk, len(ids)) in ends:
                for run in runs.values():
                    run.measure()
        needles = [_needles(model, tokenizer, makers, case, chunk, steps) for case in cases]
    rows = [
        GrowthRow(
            name,
            tuple(_points(runs[name], [found[name] for found in needles], ends, chunk)),
            tuple(part.mean().item() for part in runs[name].kl),
        )
        for name in makers
    ]
    dtype = str(model.dtype).removeprefix("torch.")
    setup = len(ids), chunk, len(depths) * samples, seed
    return GrowthResult(tuple(rows), model_name, text_name, dtype, *setup)


def _ends(tokens: int, chunk: int, parts: int) -> list[int]:
    """Return the ends of so many stretches: of whole chunks, but for the last."""
    count = -(-tokens // chunk)
    return [min(-(-count * (i + 1) // parts) * chunk, tokens) for i in range(parts)]


def _start(model: PreTrainedModel, makers: Mapping[str, Make]) -> dict[str, _CacheRun]:
    from transformers import DynamicCache

    made: dict[str, Make] = {EXACT: lambda: DynamicCache(config=model.config), **makers}
    return {name: _CacheRun(make()) for name, make in made.items()}


def _lockstep(
    model: PreTrainedModel, ids: Tensor, runs: Mapping[str, _CacheRun], chunk: int, steps: Steps
) -> Iterator[tuple[int, Tensor, dict[str, Tensor | None]]]:
    """Yield the start of each chunk, its next tokens, and the logits of each cache."""
    for start, part, targets in chunks(ids.to(input_device(model)), chunk):
        logits = {}
        for name, run in runs.items():
            logits[name] = run.forward(model, part)
            steps.done(name)
        yield start, targets, logits


def _needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    makers: Mapping[str, Make],
    case: TaskCase,
    chunk: int,
    steps: Steps,
) -> dict[str, list[list[float]]]:
    """Return each cache's needles at each end: log-probabilities less the exact cache's."""
    context, asked = prepared(tokenizer, case)
    ends = _ends(len(context), chunk, len(asked))
    runs = _start(model, makers)
    for start, _, _ in _lockstep(model, context, runs, chunk, steps):
        end = min(start + chunk, len(context))
        if end not in ends:
            continue
        so_far = asked[: ends.index(end) + 1]
        exact: list[float] = []
        for name, run in runs.items():
            mine = run.answers(model, so_far, chunk)
            exact = mine if name == EXACT else exact
            run.found.append([x - y for x, y in zip(mine, exact, strict=bool(mine))])
    return {name: runs[name].found for name in makers}


def _points(
    run: _CacheRun, needles: Sequence[list[list[float]]], ends: Sequence[int], chunk: int
) -> Iterator[GrowthPoint]:
    kl = torch.cat([torch.zeros(0, dtype=torch.float64, device="cpu"), *run.kl])
    for i, end in enumerate(ends):
        begin = max(ends[i - 1] if i else 0, chunk) - chunk
        own = kl[begin : end - chunk] if run.held >= end else kl[:0]
        found = kl.new_tensor([x for sample in needles for x in sample[i]])
        kls, recalled = (mean_and_error(x) if len(x) else (nan, nan) for x in (own, found))
        yield GrowthPoint(end, *kls, *recalled, *run.facts[i])
