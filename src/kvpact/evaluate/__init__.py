"""Quality on a real model: perplexity and KL divergence, teacher-forced through the cache."""

from kvpact.callable_package import let_tell
from kvpact.evaluate.base import Candidate, EvalProtocol, EvalRow, EvaluationError
from kvpact.evaluate.compare import Difference, SummaryRow, differences, summarize
from kvpact.evaluate.contender import Contender
from kvpact.evaluate.feed import compressed_cache
from kvpact.evaluate.files import write_report
from kvpact.evaluate.free_running import FreeRunningResult, FreeRunningRow, free_running
from kvpact.evaluate.growth import GrowthResult, grow
from kvpact.evaluate.metrics import MetricAccumulator, TokenScores, score_tokens
from kvpact.evaluate.plot import save_plot
from kvpact.evaluate.report import markdown_table
from kvpact.evaluate.result import EvalResult
from kvpact.evaluate.runner import evaluate, evaluate_text
from kvpact.evaluate.task_scores import TaskResult, TaskRow, TaskScore, score_tasks
from kvpact.evaluate.task_source import Question
from kvpact.evaluate.tasks import TaskCase, make_cases
from kvpact.evaluate.text import verdict_of

__all__ = [
    "Candidate",
    "Contender",
    "Difference",
    "EvalProtocol",
    "EvalResult",
    "EvalRow",
    "EvaluationError",
    "FreeRunningResult",
    "FreeRunningRow",
    "GrowthResult",
    "MetricAccumulator",
    "Question",
    "SummaryRow",
    "TaskCase",
    "TaskResult",
    "TaskRow",
    "TaskScore",
    "TokenScores",
    "compressed_cache",
    "differences",
    "evaluate",
    "evaluate_text",
    "free_running",
    "grow",
    "make_cases",
    "markdown_table",
    "save_plot",
    "score_tasks",
    "score_tokens",
    "summarize",
    "verdict_of",
    "write_report",
]

let_tell(__name__, evaluate_text)
