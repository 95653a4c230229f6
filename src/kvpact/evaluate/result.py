"""All that was measured of one model on one text."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.evaluate.base import EvalProtocol, EvalRow, Probe
from kvpact.evaluate.free_running import FreeRunningResult
from kvpact.evaluate.metrics import TokenScores
from kvpact.evaluate.task_scores import TaskResult

PROBES = ("free_running", "tasks")
"""Fields of `EvalResult` that are a `Probe`; also names of files and of keys of a report."""


@dataclass(frozen=True)
class EvalResult:
    """What was measured of one model on one text.

    Parameters
    ----------
    rows : list of EvalRow
        In the order of the candidates.
    protocol : EvalProtocol
        How they were measured.
    scores : tuple of TokenScores
        Of each row, token by token: what paired differences are made of (see `differences`).
    free_running : FreeRunningResult, optional
        Along the exact cache's greedy text after the same tokens (see `free_running`).
    tasks : TaskResult, optional
        Of tasks made out of the text (see `score_tasks`).
    """

    rows: list[EvalRow]
    protocol: EvalProtocol
    scores: tuple[TokenScores, ...] = ()
    free_running: FreeRunningResult | None = None
    tasks: TaskResult | None = None

    @property
    def probes(self) -> dict[str, Probe]:
        """What was measured beside the text's own scores, by name."""
        found = {name: getattr(self, name) for name in PROBES}
        return {name: probe for name, probe in found.items() if probe is not None}
