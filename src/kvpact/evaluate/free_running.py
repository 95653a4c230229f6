"""Free running: the growth of errors over many single steps, and the first other token.

The exact cache continues a prompt greedily. Every candidate is fed the same tokens one step at a
time, so its next-token distribution can be compared at each step, also after its own choice would
have been another token. A compressed cache that wrote its own text would soon be compared on
another text than the exact one, which says nothing about the size of its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvpact.evaluate.base import CacheScore, Candidate, EvaluationError, Progress, row_name
from kvpact.evaluate.canvas import COLOURS, INK, MUTED, legend, log_ticks
from kvpact.evaluate.feed import CacheFactory, Steps, cache_of, entries_of, feed, positions
from kvpact.evaluate.metrics import MetricAccumulator, TokenScores, mean_and_error, score_tokens
from kvpact.evaluate.text import kl_text, markdown
from kvpact.integrations.weights import input_device
from kvpact.recipe import SpecLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NGRAM = 8  # tokens; a text that repeats this many is likely to go in circles
SMOOTH = 16  # steps of the running mean that is drawn


@dataclass(frozen=True)
class FreeRunningRow(CacheScore):
    """One cache along the exact cache's greedy text.

    Parameters
    ----------
    spec, packed_only
        See `EvalRow`.
    kl_mean, kl_se : float
        Mean over the steps of KL(exact || this) in nats, and its standard error, steps taken as
        independent.
    kl_first, kl_last : float
        Mean over the first and the last quarter of the steps.
    top1 : float
        Percent of steps at which both caches put the same token first.
    first_divergence : int or None
        First step, counted from 1, at which this cache would have chosen another token; None where
        it never would.
    kl : tuple of float
        KL at each step.
    """

    kl_mean: float
    kl_se: float
    kl_first: float
    kl_last: float
    top1: float
    first_divergence: int | None
    kl: tuple[float, ...]


@dataclass(frozen=True)
class FreeRunningResult:
    """Rows in the order of the candidates, and the text that they were measured along.

    Parameters
    ----------
    rows : list of FreeRunningRow
        One for each candidate.
    prompt_tokens, steps : int
        Tokens of the prompt, and tokens that the exact cache chose; fewer than asked for where it
        ended the text.
    token_ids : tuple of int
        The tokens that it chose.
    distinct : float
        Percent of the text's sequences of 8 tokens that are different ones. Small models go in
        circles; there, KL is small and says little.
    text : str
        The tokens decoded; empty where there was no tokenizer.
    """

    rows: list[FreeRunningRow]
    prompt_tokens: int
    steps: int
    token_ids: tuple[int, ...]
    distinct: float
    text: str = ""

    margin: ClassVar[float] = 0.6  # inches of a figure outside its panels
    height: ClassVar[float] = 4.2  # and those of a panel
    x_label: ClassVar[str] = "step; a dot: the first at which the cache's own choice differs"

    def columns(self) -> list[str]:
        """Return the columns of the table, the spec first."""
        kl = ["KL mean", "±", "first quarter", "last quarter"]
        return ["spec", *kl, "top-1 %", "first divergence"]

    def lines(self, quote: str = "") -> list[list[str]]:
        """Return the lines of the table, a row each, with specs in quotes."""
        lines = []
        for row in self.rows:
            kl = (row.kl_mean, row.kl_se, row.kl_first, row.kl_last)
            first = row.first_divergence
            where = f"none in {self.steps}" if first is None else f"step {first}"
            lines.append([row_name(row, quote), *map(kl_text, kl), f"{row.top1:.1f}", where])
        return lines

    def tables(self) -> list[str]:
        """Return the rows as a Markdown table."""
        return [markdown(self.columns(), self.lines("`"))]

    def about(self) -> str:
        """Return how it was measured, in a few sentences."""
        return (
            f"Free running: the exact cache continues {self.prompt_tokens} tokens greedily for "
            f"{self.steps} steps, and every cache is fed that text one token at a time; KL in nats "
            "per step, first divergence is the first step at which a cache would have chosen "
            f"another token. {self.distinct:.0f} % of the text's sequences of 8 tokens are "
            "distinct."
        )

    def data(self) -> dict[str, Any]:
        """Return everything measured, ready for JSON."""
        return asdict(self)

    def draw(self, axes: Any, run: str) -> None:
        """Draw running means of KL (log scale) against the step, with dots where texts part."""
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
        axes.set_ylabel(f"KL, nats (mean over {SMOOTH} steps)", color=INK)
        title = f"{run}: free running after {self.prompt_tokens} tokens"
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        rows = [row for row in self.rows if row.spec != "none"]
        for index, row in enumerate(rows):
            colour = COLOURS[index % len(COLOURS)]
            line = running_mean(row.kl)
            style = "--" if row.packed_only else "-"
            steps = range(1, len(line) + 1)
            axes.plot(steps, line, style, color=colour, lw=1.6, label=row_name(row))
            if (at := row.first_divergence) is not None:
                dot = {"ms": 7, "mfc": "white", "mec": colour, "mew": 1.8, "zorder": 3}
                axes.plot(at, line[at - 1], "o", **dot)
        if rows:
            legend(axes, labelcolor=MUTED)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return at each place the mean of the last `SMOOTH` values up to it."""
    return [
        sum(values[max(i - SMOOTH + 1, 0) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(values))
    ]


def free_running(
    model: PreTrainedModel,
    prompt: Tensor,
    candidates: Sequence[SpecLike | Candidate],
    *,
    steps: int = 256,
    chunk: int = 256,
    packed_only: bool = False,
    tokenizer: Any = None,
    progress: Progress | None = None,
    make_cache: CacheFactory | None = None,
) -> FreeRunningResult:
    """Compare each cache with the exact one along the exact cache's greedy text.

    Parameters
    ----------
    model, packed_only, progress, make_cache
        See `evaluate`.
    prompt : Tensor
        int64 ``[N]``, fed in chunks, so that the text begins with a stored past.
    candidates : sequence of str, Spec, path, mapping or Candidate
        At least one; none is put in front.
    steps : int
        Tokens of the text. It ends sooner where the exact cache chooses a token that ends it.
    chunk : int
        Tokens of the prompt fed at a time.
    tokenizer : optional
        Decodes the text for the result.

    Raises
    ------
    EvaluationError, SpecError
        As `evaluate`; also for no step, or an empty prompt.
    """
    from transformers import DynamicCache

    check_steps(len(prompt), steps, chunk, positions(model))
    entries = entries_of(candidates, packed_only)
    caches = [DynamicCache(config=model.config)]
    caches += [cache_of(model, entry, make_cache) for entry in entries]
    names = ["exact reference", *(entry.label for entry in entries)]
    scores = [MetricAccumulator() for _ in entries]
    count = Steps(progress, len(caches) * steps)
    ends = _ends(model)
    tokens: list[int] = []
    with torch.inference_mode():
        ids, size = prompt.to(input_device(model)), chunk
        while True:
            logits = []
            for cache, name in zip(caches, names, strict=True):
                logits.append(feed(model, ids, cache, size))
                count.done(name)
            exact, *others = logits
            chosen = exact.argmax()
            for score, other in zip(scores, others, strict=True):
                score.add(score_tokens(exact[None], other[None], chosen[None]))
            tokens.append(int(chosen))
            if len(tokens) == steps or tokens[-1] in ends:
                break
            ids, size = chosen[None], 1
    rows = [_row(entry, score.scores()) for entry, score in zip(entries, scores, strict=True)]
    text = tokenizer.decode(tokens) if tokenizer is not None else ""
    return FreeRunningResult(
        rows, len(prompt), len(tokens), tuple(tokens), distinct_percent(tokens), text
    )


def check_steps(prompt: int, steps: int, chunk: int, limit: int | None = None) -> None:
    """Raise `EvaluationError` unless a prompt and `steps` tokens after it fit `limit` positions."""
    if chunk < 1 or steps < 1 or prompt < 1:
        raise EvaluationError(
            f"{steps} steps after {prompt} tokens in chunks of {chunk} are not possible; "
            "each has to be 1 or more"
        )
    if limit is not None and prompt + steps > limit:
        raise EvaluationError(
            f"{prompt} tokens and {steps} free-running steps are more than the model's {limit} "
            f"positions; take at most {max(limit - steps, 0)} tokens, or fewer steps"
        )


def distinct_percent(tokens: Sequence[int]) -> float:
    """Return the percent of sequences of `NGRAM` tokens that are different ones."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(max(len(tokens) - NGRAM + 1, 1))]
    return 100 * len(set(grams)) / len(grams)


def _ends(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a text."""
    config = getattr(model, "generation_config", None) or model.config
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def _row(entry: Candidate, scores: TokenScores) -> FreeRunningRow:
    mean, error = mean_and_error(scores.kl)
    quarter = max(len(scores.kl) // 4, 1)
    differs = (~scores.agree).nonzero().flatten()
    return FreeRunningRow(
        spec=entry.label,
        packed_only=entry.packed_only,
        kl_mean=mean,
        kl_se=error,
        kl_first=scores.kl[:quarter].mean().item(),
        kl_last=scores.kl[-quarter:].mean().item(),
        top1=100 * scores.agree.double().mean().item(),
        first_divergence=int(differs[0]) + 1 if len(differs) else None,
        kl=tuple(scores.kl.tolist()),
    )
