"""All measurements of one model on one text."""

from dataclasses import dataclass
from os import PathLike

from kvpact.callable_package import Told
from kvpact.evaluate.base import EvalProtocol, EvalRow, row_name, run_name, whole_share
from kvpact.evaluate.free_running import FreeRunningResult
from kvpact.evaluate.metrics import TokenScores
from kvpact.evaluate.plot import Probe, save_plot
from kvpact.evaluate.task_scores import TaskResult
from kvpact.evaluate.text import kl_text, verdict_of
from kvpact.files import aligned

PROBES = ("free_running", "tasks")
"""Fields of `EvalResult` that are a `Probe`; also names of files and of keys of a report."""


@dataclass(frozen=True, repr=False)
class EvalResult(Told):
    """The measurements of one model on one text; `print` shows the answer and a line a cache.

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

    def __repr__(self) -> str:
        rows = ((row_name(x), self.verdict(x), x) for x in self.rows)
        lines = ([name, f"{verdict:<10}", *self._figures(x)] for name, verdict, x in rows)
        return f"{self.answer}\n\n{aligned(list(lines))}"

    @property
    def answer(self) -> str:
        """The smallest cache that is close or better, else that of the least KL."""
        rows = [row for row in self.rows if row.spec != "none"] or self.rows
        good = [row for row in rows if self.verdict(row) in ("exact", "very close", "close")]
        least = min(rows, key=lambda row: row.kl_mean)
        row = min(good or [least], key=lambda row: row.bytes + row.native_bytes)
        figures = ", ".join((self.verdict(row), *self._figures(row)))
        spec, _, sliding = row.spec.partition(" sliding=")
        more = f", sliding={sliding!r}" if sliding else ""
        return f"{row_name(row)}: {figures}; write CompressedCache(model, {spec!r}{more})"

    def verdict(self, row: EvalRow) -> str:
        """Return the verdict on a row (see `VERDICTS`)."""
        return verdict_of(row.kl_mean, self.protocol.scored)

    @staticmethod
    def _figures(row: EvalRow) -> tuple[str, str]:
        kl = f"KL {kl_text(row.kl_mean)} +- {kl_text(row.kl_se)}"
        return kl, f"{whole_share(row)} % of an exact 16-bit cache"

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw mean KL over bytes into a PNG (see `save_plot`)."""
        save_plot(self.rows, path, title=run_name(self.protocol))

    @property
    def probes(self) -> dict[str, Probe]:
        """The measurements besides the text's own scores, by name."""
        found = {name: getattr(self, name) for name in PROBES}
        return {name: probe for name, probe in found.items() if probe is not None}
