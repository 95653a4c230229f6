"""The common parts of all plots: figures, colours, axes."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from kvpact.errors import BackendUnavailable

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
MARKERS = "osD^vP*X"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#5d3a9b", "#7f7f7f")

RISES = (0, 14, -14, 28, -28, 44, -44, 60, -60, 80, -80, 100, -100, 125, -125)  # points up or down


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of `size` inches, 150 dots each."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable(
            "matplotlib is not installed; pip install 'kvpact[eval]' to get the plot"
        ) from error
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Any) -> None:
    """Leave nothing on axes but a light grid."""
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend(axes: Any, **style: Any) -> None:
    """Place the legend right of the axes."""
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), **style)


def error_bars(
    axes: Any,
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[tuple[int, float, float, float]]]],
    size: float,
) -> None:
    """Draw labelled series of points (row, value, bar below, bar above) over rows with names."""
    for index, (label, points) in enumerate(series):
        offset = (index - (len(series) - 1) / 2) * 0.6 / len(series)
        axes.errorbar(
            [point[1] for point in points],
            [point[0] + offset for point in points],
            xerr=[[point[2] for point in points], [point[3] for point in points]],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=label,
            ms=size,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    legend(axes)


def log_ticks(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each power of ten, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def place_labels(figure: Any, axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Name points (x, y, text), covering nothing; scales and layout may not change afterwards."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    places = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_extents(x - 10, y - 10, x + 10, y + 10) for x, y in places]
    frame = axes.get_window_extent()
    allowed = list(product(RISES, (1, -1)))
    leader = {"arrowstyle": "-", "color": MUTED, "lw": 0.7, "shrinkA": 1, "shrinkB": 5}
    for x, y, text in sorted(points, key=lambda point: -point[1]):
        for place, (rise, side) in enumerate(allowed):
            label = axes.annotate(
                text,
                (x, y),
                xytext=(side * (16 if rise else 10), rise),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=9.5,
                color=INK,
                # From the point to the near edge of the label.
                arrowprops={**leader, "relpos": (0 if side > 0 else 1, 0.5)} if rise else None,
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # without the line that leads to it
            inside = frame.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            inside = inside and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if (inside and not box.count_overlaps(taken)) or place == len(allowed) - 1:
                break
            label.remove()
        taken.append(box)
