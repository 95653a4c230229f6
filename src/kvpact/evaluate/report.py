"""Evaluations in words and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpact.evaluate.base import EvalProtocol, EvalRow, row_name, whole_share
from kvpact.evaluate.compare import Difference, SummaryRow
from kvpact.evaluate.text import kl_text, markdown

READING = (
    "KL: nats per token, exact cache against this one, the smaller the better (perplexity is "
    "noisier); ± is the standard error over tokens, taken as independent. bits/value: all bytes "
    "held, exact sinks and window included; slots: packed alone. of 16 bits %: the bytes of all "
    "layers, compressed or not, over the exact cache's, both counted for a model in 16 bits."
)

PAIRED = (
    "Paired over tokens; ± is the standard error of the mean difference. better, worse: runs whose "
    "difference is beyond two standard errors. Each run counts equally; ratio is a geometric mean."
)
LEARNING = (
    " Methods that learn from tokens (low rank, codebooks, keys of trellis, pca) learn from the "
    "first chunk alone, layer by layer, and keep that, unless a calibration was given; what they "
    "learnt counts among bytes and slots."
)


def markdown_table(rows: Sequence[EvalRow]) -> str:
    """Return the rows of an evaluation as a Markdown table."""
    return markdown(list(_COLUMNS), [[cell(row) for cell in _COLUMNS.values()] for row in rows])


def difference_table(found: Sequence[Difference]) -> str:
    """Return paired differences as a Markdown table; empty where there are none."""
    if not found:
        return ""
    columns = ["spec", f"KL less that of `{found[0].against}`", "±", "ratio", "NLL less", "±"]
    rows = []
    for x in found:
        kl = [signed(x.kl_difference), kl_text(x.kl_difference_se), f"{x.kl_ratio:.3f}"]
        rows.append([f"`{x.spec}`", *kl, signed(x.nll_difference), kl_text(x.nll_difference_se)])
    return markdown(columns, rows)


def summary_table(rows: Sequence[SummaryRow]) -> str:
    """Return a summary over models and texts as a Markdown table; empty where there is none."""
    if not rows:
        return ""
    return markdown(summary_columns(rows), [[f"`{row.spec}`", *summary_cells(row)] for row in rows])


def summary_columns(rows: Sequence[SummaryRow]) -> list[str]:
    """Return the names of the columns of a summary."""
    against = f"less `{rows[0].against}`"
    return ["spec", "KL mean", "±", "KL worst run", "ratio", against, "±", "better", "worse"]


def summary_cells(row: SummaryRow) -> list[str]:
    """Return the figures of a summary's row."""
    return [
        kl_text(row.kl_mean),
        kl_text(row.kl_mean_se),
        kl_text(row.kl_max),
        f"{row.kl_ratio:.3f}",
        signed(row.kl_difference),
        kl_text(row.kl_difference_se),
        f"{row.better} of {row.runs}",
        f"{row.worse} of {row.runs}",
    ]


def protocol_text(protocol: EvalProtocol, rows: Sequence[EvalRow]) -> str:
    """Return how it was measured, in a few sentences."""
    versions = ", ".join(f"{name} {version}" for name, version in protocol.versions.items())
    return (
        f"{protocol.model or 'model'} ({protocol.dtype}, {protocol.device}), "
        f"{protocol.tokens} tokens of {protocol.text or 'text'} in chunks of {protocol.chunk}, "
        f"{protocol.scored} scored: teacher-forced, the first chunk left out; a chunk attends to "
        "the past as stored, and to itself exactly, but in rows marked packed only or new as "
        "stored, as decoding without a window does; the exact reference "
        f"is chunked the same way and has perplexity {protocol.reference_perplexity:.4f}."
        + (LEARNING if any(row.fitted for row in rows) else "")
        + "".join(f" {text}" for text in (coverage_text(rows),) if text)
        + f" {versions}; {protocol.threads} threads."
    )


def coverage_text(rows: Sequence[EvalRow]) -> str:
    """Return which part of the exact cache's bytes is compressed; empty where it is not known."""
    best = max(rows, key=lambda row: row.covered_bytes, default=None)
    if best is None or not best.covered_bytes:
        return ""
    share = 100 * best.covered_bytes / best.exact_bytes
    text = (
        f"Coverage: {share:.1f} % of the exact cache's {best.exact_bytes / 1e6:.2f} MB at this "
        "context are compressed"
    )
    if best.layers_native:
        text += (
            f"; {best.layers_native} layers are no full attention and stay exact, "
            f"{best.native_bytes / 1e6:.2f} MB of every cache"
        )
    elif best.native_bytes:
        text += f"; other states stay exact, {best.native_bytes / 1e6:.2f} MB of every cache"
    return text + "."


def signed(value: float) -> str:
    """Return a difference with its sign, as `kl_text`."""
    return ("+" if value >= 0 else "") + kl_text(value)


_COLUMNS: dict[str, Callable[[EvalRow], str]] = {
    "spec": lambda row: row_name(row, "`"),
    "bits/value": lambda row: f"{row.bits_per_value:.3f}",
    "slots": lambda row: f"{row.slot_bits_per_value:.3f}",
    "MB": lambda row: f"{row.bytes / 1e6:.2f}",
    "of 16 bits %": whole_share,
    "perplexity": lambda row: f"{row.perplexity:.4f}",
    "change %": lambda row: f"{row.perplexity_change:+.3f}",
    "± %": lambda row: f"{row.perplexity_change_se:.3f}",
    "KL mean": lambda row: kl_text(row.kl_mean),
    "KL ±": lambda row: kl_text(row.kl_se),
    "KL median": lambda row: kl_text(row.kl_median),
    "KL p99": lambda row: kl_text(row.kl_p99),
    "KL max": lambda row: kl_text(row.kl_max),
    "top-1 %": lambda row: f"{row.top1:.2f}",
    "sinks": lambda row: str(row.sinks),
    "window": lambda row: str(row.window),
    "seconds": lambda row: f"{row.seconds:.1f}",
}
