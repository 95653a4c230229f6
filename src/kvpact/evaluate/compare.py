"""Specs against one another: paired differences, and a summary over models and texts.

All caches were fed the same tokens, so the tokens are pairs: the error of a difference leaves out
how hard each token is, and is far smaller than those of the two means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpact.evaluate.base import EvalRow, EvaluationError, row_name
from kvpact.evaluate.metrics import mean_and_error
from kvpact.evaluate.result import EvalResult

CLEAR = 2  # standard errors beyond which a difference is counted as one


@dataclass(frozen=True)
class Difference:
    """A spec against the baseline, on one model and text.

    Parameters
    ----------
    spec, against : str
        Names of the two rows.
    kl_difference, kl_difference_se : float
        Mean over tokens of this KL less the baseline's, in nats, and its standard error. Tokens
        are taken as independent.
    kl_ratio : float
        Ratio of the two mean KLs; NaN where the baseline's is zero.
    nll_difference, nll_difference_se : float
        The same of the true next token's negative log-likelihood.
    """

    spec: str
    against: str
    kl_difference: float
    kl_difference_se: float
    kl_ratio: float
    nll_difference: float
    nll_difference_se: float


def baseline_index(rows: Sequence[EvalRow], against: str | None = None) -> int | None:
    """Return the baseline's row: `against`'s, or the first but ``none``; None if there is none."""
    if against is None:
        return next((i for i, row in enumerate(rows) if row.spec != "none"), None)
    for i, row in enumerate(rows):
        if against in (row.spec, row_name(row)):
            return i
    names = ", ".join(row_name(row) for row in rows)
    raise EvaluationError(f"{against!r} is not among what is compared; take one of {names}")


def differences(result: EvalResult, against: str | None = None) -> list[Difference]:
    """Compare every row with the baseline, token by token, but the exact cache unless asked for.

    Parameters
    ----------
    result : EvalResult
        What `evaluate` returned.
    against : str, optional
        The baseline's spec as it was given; the first row that is not ``none`` if omitted.

    Raises
    ------
    EvaluationError
        No such baseline.
    """
    chosen = baseline_index(result.rows, against)
    if chosen is None:
        return []
    base = result.scores[chosen]
    found = []
    for i, (row, scores) in enumerate(zip(result.rows, result.scores, strict=True)):
        if i == chosen or row.spec == "none":
            continue
        kl, kl_se = mean_and_error(scores.kl - base.kl)
        nll, nll_se = mean_and_error(scores.nll - base.nll)
        ratio = row.kl_mean / result.rows[chosen].kl_mean if base.kl.any() else math.nan
        found.append(
            Difference(row_name(row), row_name(result.rows[chosen]), kl, kl_se, ratio, nll, nll_se)
        )
    return found


@dataclass(frozen=True)
class SummaryRow:
    """A spec over all models and texts.

    Parameters
    ----------
    spec, against : str
        Its name and the baseline's.
    runs : int
        Models times texts.
    kl_mean, kl_mean_se, kl_max : float
        Mean of the runs' mean KLs (each run counts equally), its standard error from the tokens of
        these runs (other models or texts vary more), and the worst run's.
    kl_ratio : float
        Geometric mean of the runs' ratios to the baseline; 1 for the baseline.
    kl_difference, kl_difference_se : float
        Mean of the runs' paired differences, and its standard error from their tokens.
    better, worse : int
        Runs in which the paired difference is negative, or positive, by more than two of its
        standard errors.
    """

    spec: str
    against: str
    runs: int
    kl_mean: float
    kl_mean_se: float
    kl_max: float
    kl_ratio: float
    kl_difference: float
    kl_difference_se: float
    better: int
    worse: int


def summarize(results: Sequence[EvalResult], against: str | None = None) -> list[SummaryRow]:
    """Summarise the same specs, all but the exact cache, over several models and texts.

    Parameters
    ----------
    results : sequence of EvalResult
        One for each model and text, with the same candidates.
    against : str, optional
        As of `differences`.

    Raises
    ------
    EvaluationError
        The results are of unlike candidates, or there is no such baseline.
    """
    names = [[row_name(row) for row in result.rows] for result in results]
    if not results or any(other != names[0] for other in names):
        raise EvaluationError("a summary needs evaluations of the same specs; give at least one")
    chosen = baseline_index(results[0].rows, against)
    if chosen is None:
        return []
    pairs = [{d.spec: d for d in differences(result, against)} for result in results]
    found = []
    for i, name in enumerate(names[0]):
        if results[0].rows[i].spec == "none":
            continue
        rows = [result.rows[i] for result in results]
        own = [pair[name] for pair in pairs] if i != chosen else []
        found.append(_summary_row(name, names[0][chosen], rows, own))
    return found


def _summary_row(
    name: str, against: str, rows: list[EvalRow], pairs: list[Difference]
) -> SummaryRow:
    count = len(rows)
    ratios = [pair.kl_ratio for pair in pairs] or [1.0]
    positive = all(ratio > 0 for ratio in ratios)
    return SummaryRow(
        spec=name,
        against=against,
        runs=count,
        kl_mean=sum(row.kl_mean for row in rows) / count,
        kl_mean_se=_of_mean([row.kl_se for row in rows]),
        kl_max=max(row.kl_mean for row in rows),
        kl_ratio=math.exp(sum(map(math.log, ratios)) / len(ratios)) if positive else math.nan,
        kl_difference=sum(pair.kl_difference for pair in pairs) / count,
        kl_difference_se=_of_mean([pair.kl_difference_se for pair in pairs] or [0.0]),
        better=sum(pair.kl_difference < -CLEAR * pair.kl_difference_se for pair in pairs),
        worse=sum(pair.kl_difference > CLEAR * pair.kl_difference_se for pair in pairs),
    )


def _of_mean(errors: list[float]) -> float:
    """Return the standard error of the mean of independent figures with these errors."""
    return math.sqrt(sum(error**2 for error in errors)) / len(errors)
