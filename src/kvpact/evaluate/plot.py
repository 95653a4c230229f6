"""KL over bits per value: one labelled point a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvpact.evaluate.base import EvalRow, row_name
from kvpact.evaluate.canvas import COLOURS, INK, MUTED, new_figure, plain_axes

FLOOR = 1e-9  # below it a KL is rounding of the arithmetic, not of the cache
RISES = (0, 14, -14, 28, -28, 44, -44, 60, -60, 80, -80, 100, -100, 125, -125)
PLACES = [(side, rise) for rise in RISES for side in (1, -1)]  # points right/left, up/down


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
        _labels(figure, axes, drawn)
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


def _leader(side: int) -> dict[str, Any]:
    """Return the line from a point to the near edge of its label."""
    line = {"arrowstyle": "-", "color": MUTED, "lw": 0.7, "shrinkA": 1, "shrinkB": 5}
    return {**line, "relpos": (0 if side > 0 else 1, 0.5)}


def _labels(figure: Any, axes: Any, rows: Sequence[EvalRow]) -> None:
    """Put each label at the nearest place where it covers no point and no other label."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    points = [axes.transData.transform((row.bits_per_value, row.kl_mean)) for row in rows]
    taken = [Bbox.from_extents(x - 10, y - 10, x + 10, y + 10) for x, y in points]
    frame = axes.get_window_extent()
    for row in sorted(rows, key=lambda row: -row.kl_mean):
        for place, (side, rise) in enumerate(PLACES):
            label = axes.annotate(
                row_name(row),
                (row.bits_per_value, row.kl_mean),
                xytext=(side * (16 if rise else 10), rise),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=9.5,
                color=INK,
                arrowprops=_leader(side) if rise else None,
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # without the line that leads to it
            inside = frame.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            inside = inside and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if (inside and not box.count_overlaps(taken)) or place == len(PLACES) - 1:
                break
            label.remove()
        taken.append(box)
