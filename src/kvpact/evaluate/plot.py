"""KL over bits per value: one labelled point a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvpact.evaluate.base import EvalRow, row_name
from kvpact.evaluate.canvas import (
    COLOURS,
    INK,
    MUTED,
    new_figure,
    place_labels,
    plain_axes,
)

FLOOR = 1e-9  # below it a KL is rounding of the arithmetic, not of the cache


def save_plot(rows: Sequence[EvalRow], path: str | PathLike[str], *, title: str = "") -> None:
    """Draw mean KL (log scale) over bits per value, all bytes counted.

    Parameters
    ----------
    rows : sequence of EvalRow
        Rows whose KL is below 1e-9 (the exact cache) or not finite are named under the plot.
    path : str or path
        A PNG of 1500 x 960 pixels.
    title : str
        A line above the plot.

    Raises
    ------
    BackendUnavailable
        matplotlib is not installed.
    """
    figure = new_figure((10, 6.4))
    axes: Any = figure.add_subplot()
    drawn = [row for row in rows if FLOOR < row.kl_mean < math.inf]
    _style(axes, title)
    if drawn:
        _scale(axes, drawn)
        _points(axes, drawn)
    missing = [
        f"{row_name(row)} (KL {0 if row.kl_mean <= FLOOR else row.kl_mean}, "
        f"{row.bits_per_value:.3g} bits)"
        for row in rows
        if row not in drawn
    ]
    if missing:
        names = "not drawn: " + ", ".join(missing)
        figure.text(0.99, 0.012, names, ha="right", color=MUTED, fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.canvas.draw()
    if drawn:
        named = [(row.bits_per_value, row.kl_mean, row_name(row)) for row in drawn]
        place_labels(figure, axes, named)
    figure.savefig(path)


def _style(axes: Any, title: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel("bits per value, all bytes held (sinks, window, unused included)", color=INK)
    axes.set_ylabel("mean KL to the exact cache, nats per token", color=INK)
    axes.set_title(title, loc="left", fontsize=11, color=INK, wrap=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plain_axes(axes)


def _scale(axes: Any, rows: Sequence[EvalRow]) -> None:
    """Leave room on all sides for labels."""
    bits = [row.bits_per_value for row in rows]
    kl = [row.kl_mean for row in rows]
    span = max(max(bits) - min(bits), 1.0)
    axes.set_xlim(min(bits) - 0.08 * span, max(bits) + 0.2 * span)
    ratio = max(max(kl) / min(kl), 10.0) ** 0.1
    axes.set_ylim(min(kl) / ratio, max(kl) * ratio)


def _colour(row: EvalRow, rows: Sequence[EvalRow]) -> str:
    """Return one colour a method, so that its options are seen as one family."""
    names = list(dict.fromkeys(_family(other) for other in rows))
    return COLOURS[names.index(_family(row)) % len(COLOURS)]


def _family(row: EvalRow) -> str:
    return "/".join(side.partition(":")[0] for side in row.spec.split("/"))


def _points(axes: Any, rows: Sequence[EvalRow]) -> None:
    for row in rows:
        colour = _colour(row, rows)
        face = "white" if row.packed_only else colour
        axes.plot(
            row.bits_per_value, row.kl_mean, "o", ms=8, mew=1.8, mec=colour, mfc=face, zorder=3
        )
