"""Scoring tasks: the log-probability of each answer, exact cache against compressed cache.

A model that is too weak to answer still puts a probability on the answer, and a cache that lost
what was asked for moves it. So the difference is measured even where nothing is answered right.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvpact.evaluate.base import CacheScore, Candidate, EvaluationError, Progress, row_name
from kvpact.evaluate.canvas import INK, error_bars
from kvpact.evaluate.feed import CacheFactory, Steps, cache_of, entries_of, feed, forward, positions
from kvpact.evaluate.metrics import mean_and_error
from kvpact.evaluate.tasks import TaskCase
from kvpact.evaluate.text import markdown
from kvpact.integrations.weights import input_device
from kvpact.recipe import SpecLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TaskScore(CacheScore):
    """One question under one cache.

    Parameters
    ----------
    spec, packed_only
        See `EvalRow`.
    task : str
        The task's name.
    sample : int
        Which of its contexts.
    depth : float
        Where the answer was to be found, from 0 to 1.
    logprob, exact_logprob : float
        Log-probability of the whole answer in nats, teacher-forced, under this cache and under
        the exact one.
    correct, exact_correct : bool
        Whether every token of the answer was the likeliest one.
    """

    task: str
    sample: int
    depth: float
    logprob: float
    exact_logprob: float
    correct: bool
    exact_correct: bool


@dataclass(frozen=True)
class TaskRow(CacheScore):
    """The questions of a task, at one depth or at all, under one cache.

    Parameters
    ----------
    spec, packed_only
        See `EvalRow`.
    task : str or None
        None for all tasks.
    depth : float or None
        None for all depths.
    questions : int
        How many.
    logprob, exact_logprob : float
        Mean log-probability of the answers in nats.
    difference, difference_se : float
        Mean of this cache's log-probability less the exact one's, below zero where the cache lost
        something, and its standard error: questions are the pairs. NaN for fewer than two.
    correct, exact_correct : float
        Percent of questions answered right: of ``tools`` the share of arguments that are kept.
    correct_se, exact_correct_se, change_se : float
        Standard errors of both, and of their difference, questions paired.
    """

    task: str | None
    depth: float | None
    questions: int
    logprob: float
    exact_logprob: float
    difference: float
    difference_se: float
    correct: float
    exact_correct: float
    correct_se: float
    exact_correct_se: float
    change_se: float

    @property
    def text(self) -> str:
        """The difference and its standard error."""
        return f"{self.difference:+.3f} ± {self.difference_se:.3f}"

    @property
    def right(self) -> tuple[str, str]:
        """Percent answered right, and the change from the exact cache, with their errors."""
        change = self.correct - self.exact_correct
        return (
            f"{self.correct:.1f} ± {self.correct_se:.1f}",
            f"{change:+.1f} ± {self.change_se:.1f}",
        )


@dataclass(frozen=True)
class TaskResult:
    """Scores of all questions, how many tokens the longest context has, and the seed."""

    scores: list[TaskScore]
    context_tokens: int
    seed: int

    def rows(self) -> list[TaskRow]:
        """Return means: for each cache each task at each depth, each task, and all tasks."""
        tasks = list(dict.fromkeys(score.task for score in self.scores))
        depths = list(dict.fromkeys(score.depth for score in self.scores))
        caches = dict.fromkeys((score.spec, score.packed_only) for score in self.scores)
        wanted: list[tuple[str | None, float | None]] = [
            (task, depth) for task in tasks for depth in (*depths, None)
        ]
        rows = []
        for cache in caches:
            own = [score for score in self.scores if (score.spec, score.packed_only) == cache]
            for task, depth in (*wanted, (None, None)):
                found = [s for s in own if task in (None, s.task) and depth in (None, s.depth)]
                rows.append(_row(found, task, depth))
        return rows

    margin: ClassVar[float] = 1.0
    x_label: ClassVar[str] = (
        "log-probability of the answer less the exact cache's, nats; bars: two standard errors"
    )

    @property
    def height(self) -> float:
        """Inches of a panel of the chart."""
        return 1.4 + 0.5 * len({row_name(score) for score in self.scores})

    def _by_cache(self) -> dict[str, list[TaskRow]]:
        """Return the rows of all depths by cache: a row a task, then that of all tasks."""
        found: dict[str, list[TaskRow]] = {}
        for row in self.rows():
            if row.depth is None:
                found.setdefault(row_name(row), []).append(row)
        return found

    def columns(self) -> list[str]:
        """Return the columns: the spec, each task, all tasks, and answers that are right."""
        tasks = dict.fromkeys(score.task for score in self.scores)
        return ["spec", *tasks, "all tasks", "right %", "change"]

    def lines(self, quote: str = "") -> list[list[str]]:
        """Return the exact cache's log-probabilities, then each cache's differences from them."""
        caches = self._by_cache()
        first = next(iter(caches.values()))
        exact = [f"{row.exact_logprob:.3f}" for row in first]
        right = f"{first[-1].exact_correct:.1f} ± {first[-1].exact_correct_se:.1f}"
        lines = [["exact: log-probability", *exact, right, ""]]
        for name, rows in caches.items():
            lines.append([name, *(row.text for row in rows), *rows[-1].right])
        return lines

    def tables(self) -> list[str]:
        """Return the table of all depths, and that of each depth, as Markdown."""
        rows = [row for row in self.rows() if row.depth is not None]
        depths = sorted({row.depth for row in rows if row.depth is not None})
        cells: dict[tuple[str, str], list[str]] = {}
        for row in sorted(rows, key=lambda row: row.depth or 0.0):
            cells.setdefault((row_name(row, "`"), row.task or ""), []).append(row.text)
        columns = ["spec", "task", *(f"depth {depth:g}" for depth in depths)]
        by_depth = markdown(columns, [[*key, *line] for key, line in cells.items()], left=2)
        return [markdown(self.columns(), self.lines()), by_depth]

    def about(self) -> str:
        """Return how it was measured, in a few sentences."""
        return (
            f"Tasks: {self.rows()[-1].questions} questions after contexts of up to "
            f"{self.context_tokens} tokens made of the text with seed {self.seed}; log-probability "
            "of the whole answer, teacher-forced, in nats: that under this cache less that under "
            "the exact one, and its standard error, questions paired. right: every token of the "
            "answer is the likeliest; change: from the exact cache."
        )

    def data(self) -> dict[str, Any]:
        """Return everything measured, and the means of it, ready for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows()]}

    def draw(self, axes: Any, run: str) -> None:
        """Draw what each cache takes off the answers' log-probability, a series a task."""
        caches = self._by_cache()
        axes.set_title(f"{run}: tasks", loc="left", fontsize=11, color=INK)
        axes.axvline(0, color=INK, lw=0.8)
        series = []
        for task, *rows in zip(self.columns()[1:-3], *caches.values(), strict=False):
            points = enumerate((row.difference, 2 * row.difference_se) for row in rows)
            series.append((task, [(i, middle, bar, bar) for i, (middle, bar) in points]))
        error_bars(axes, list(caches), series, 6)


def score_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[TaskCase],
    candidates: Sequence[SpecLike | Candidate],
    *,
    seed: int = 0,
    chunk: int = 256,
    packed_only: bool = False,
    progress: Progress | None = None,
    make_cache: CacheFactory | None = None,
) -> TaskResult:
    """Score the answers of tasks under each cache and under the exact one.

    A context is fed in chunks; then each question, with its answer, is fed to a copy of the cache.

    Parameters
    ----------
    model, tokenizer
        As `kvpact.integrations.models.load_model` gives them.
    cases : sequence of TaskCase
        What `make_cases` returned.
    candidates, chunk, packed_only, progress, make_cache
        See `free_running`; chunks are those of a context.
    seed : int
        The seed of the cases, for the report.

    Raises
    ------
    EvaluationError, SpecError
        As `evaluate`; also for no case.
    """
    from transformers import DynamicCache

    entries = entries_of(candidates, packed_only)
    ready = [prepared(tokenizer, case) for case in cases]
    _check(ready, chunk, positions(model))
    steps = Steps(progress, len(cases) * (1 + len(entries)))
    scores: list[TaskScore] = []
    with torch.inference_mode():
        for case, (context, asked) in zip(cases, ready, strict=True):
            cache = DynamicCache(config=model.config)
            exact = _answers(model, cache, context, asked, chunk)
            steps.done(f"{case.task}: exact reference")
            for entry in entries:
                cache = cache_of(model, entry, make_cache)
                found = _answers(model, cache, context, asked, chunk)
                steps.done(f"{case.task}: {entry.label}")
                scores += [
                    TaskScore(
                        entry.label, entry.packed_only, case.task, case.sample, question.depth,
                        mine[0], reference[0], mine[1], reference[1],
                    )
                    for question, mine, reference in zip(case.questions, found, exact, strict=True)
                ]  # fmt: skip
    return TaskResult(scores, max(len(context) for context, _ in ready), seed)


Asked = list[tuple[Tensor, int]]  # ids of a question with its answer, and tokens of the answer


def prepared(tokenizer: PreTrainedTokenizerBase, case: TaskCase) -> tuple[Tensor, Asked]:
    """Return the ids of a case's context, and of its questions."""

    def ids(text: str, **options: Any) -> Tensor:
        found = list(tokenizer(text, **options)["input_ids"])
        return torch.tensor(found, dtype=torch.int64, device="cpu")

    asked = []
    for question in case.questions:
        parts = [ids(x, add_special_tokens=False) for x in (question.prompt, question.answer)]
        asked.append((torch.cat(parts), len(parts[1])))
    return ids(case.context), asked


def _check(ready: list[tuple[Tensor, Asked]], chunk: int, limit: int | None) -> None:
    if not ready:
        raise EvaluationError("there is no task to score; give cases of make_cases")
    if chunk < 1:
        raise EvaluationError(f"chunk {chunk} is not possible; take 1 or more, 256 is usual")
    longest = max(len(context) + len(ids) for context, asked in ready for ids, _ in asked)
    if limit is not None and longest > limit:
        raise EvaluationError(
            f"a context with its question has {longest} tokens, the model {limit} positions; "
            "take fewer tokens"
        )


def _answers(
    model: PreTrainedModel, cache: Any, context: Tensor, asked: Asked, chunk: int
) -> list[tuple[float, bool]]:
    """Feed a context; return what `answers` returns after it."""
    feed(model, context.to(input_device(model)), cache, chunk)
    return answers(model, cache, asked)


def answers(
    model: PreTrainedModel, cache: Any, asked: Asked, chunk: int | None = None
) -> list[tuple[float, bool]]:
    """Return for each question its answer's log-probability, and whether it is the choice."""
    found = []
    for question, length in asked:
        ids, copied = question.to(input_device(model)), deepcopy(cache)
        begin = 0 if chunk is None else len(ids) - length - 1
        if begin:
            feed(model, ids[:begin], copied, chunk or begin)
        log_p = forward(model, ids[begin:], copied)[-length - 1 : -1].double().log_softmax(-1)
        answer = ids[-length:]
        chosen = log_p.gather(-1, answer[:, None]).sum().item()
        found.append((chosen, bool((log_p.argmax(-1) == answer).all())))
    return found


def _row(scores: list[TaskScore], task: str | None, depth: float | None) -> TaskRow:
    values = torch.tensor(
        [(x.logprob, x.exact_logprob, 100 * x.correct, 100 * x.exact_correct) for x in scores],
        dtype=torch.float64, device="cpu",
    )  # fmt: skip
    mine, exact, right, exact_right = values.unbind(1)
    difference, error = mean_and_error(mine - exact)
    (kept, kept_error), (own, own_error) = mean_and_error(right), mean_and_error(exact_right)
    return TaskRow(
        spec=scores[0].spec,
        packed_only=scores[0].packed_only,
        task=task,
        depth=depth,
        questions=len(scores),
        logprob=mine.mean().item(),
        exact_logprob=exact.mean().item(),
        difference=difference,
        difference_se=error,
        correct=kept,
        exact_correct=own,
        correct_se=kept_error,
        exact_correct_se=own_error,
        change_se=mean_and_error(right - exact_right)[1],
    )
