"""All that was measured of one model on one text."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from kvpact.evaluate.base import EvalProtocol, EvalRow, Probe, row_name, run_name, whole_share
from kvpact.evaluate.free_running import FreeRunningResult
from kvpact.evaluate.metrics import TokenScores
from kvpact.evaluate.plot import save_plot
from kvpact.evaluate.task_scores import TaskResult
from kvpact.evaluate.text import kl_text
from kvpact.evaluate.verdict import verdict_of

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

    def __str__(self) -> str:
        """Return a line for each row: what it costs in words and as KL, and what is held."""
        width = max(len(row_name(row)) for row in self.rows)
        return "\n".join(
            f"{row_name(row):<{width}}  {verdict_of(row.kl_mean):<13}  KL {kl_text(row.kl_mean)} ± "
            f"{kl_text(row.kl_se)}  {whole_share(row)} % of the exact cache"
            for row in self.rows
        )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw mean KL over bits per value into a PNG (see `save_plot`)."""
        save_plot(self.rows, path, title=run_name(self.protocol))

    @property
    def probes(self) -> dict[str, Probe]:
        """What was measured beside the text's own scores, by name."""
        found = {name: getattr(self, name) for name in PROBES}
        return {name: probe for name, probe in found.items() if probe is not None}
