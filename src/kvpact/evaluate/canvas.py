"""What all plots have in common: figures, colours, axes."""

from __future__ import annotations

from typing import Any

from kvpact.errors import BackendUnavailable

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
MARKERS = "osD^vP*X"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#5d3a9b", "#7f7f7f")


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of `size` inches, 150 dots each.

    Raises
    ------
    BackendUnavailable
        matplotlib is not installed.
    """
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


def log_ticks(axis: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each power of ten, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
