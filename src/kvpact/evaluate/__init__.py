"""Quality on a real model: perplexity and KL divergence, teacher-forced through the cache."""

from kvpact.evaluate.base import Candidate, EvalProtocol, EvalResult, EvalRow, EvaluationError
from kvpact.evaluate.metrics import MetricAccumulator, Metrics, TokenScores, score_tokens
from kvpact.evaluate.plot import save_plot
from kvpact.evaluate.report import markdown_table, write_report
from kvpact.evaluate.runner import compressed_cache, evaluate, evaluate_text

__all__ = [
    "Candidate",
    "EvalProtocol",
    "EvalResult",
    "EvalRow",
    "EvaluationError",
    "MetricAccumulator",
    "Metrics",
    "TokenScores",
    "compressed_cache",
    "evaluate",
    "evaluate_text",
    "markdown_table",
    "save_plot",
    "score_tokens",
    "write_report",
]
