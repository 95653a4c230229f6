"""Pictures as SVG, in colours that can be read on light and on dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context

from kvpact.evaluate.canvas import COLOURS, GRID, INK, MARKERS, MUTED, new_figure, plain_axes

PAPER = "#ffffff"
DARK = {PAPER: "#1b1c1e", INK: "#e4e4e4", MUTED: "#a3a3a3", GRID: "#3a3a3a"} | dict(
    zip(
        COLOURS,
        ("#58b2e8", "#ff9a57", "#35cf9f", "#e69cc9", "#d9b93a", "#8fd6ff", "#b99af0", "#aaaaaa"),
        strict=True,
    )
)
"""Which colour takes the place of which on a dark page."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvpact",  # the same figures are the same file
    "font.size": 10,
    "text.color": INK,
    **{f"{part}.labelcolor": MUTED for part in ("axes", "xtick", "ytick")},
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
}


def plot(title: str, size: tuple[float, float]) -> Any:
    """Return axes with a title, alone in a figure of `size` inches."""
    figure = new_figure(size)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    plain_axes(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return axes


def svg(axes: Any) -> str:
    """Return a picture as SVG."""
    file = io.StringIO()
    about = {"Title": axes.figure.get_suptitle(), "Date": None, "Creator": None}
    axes.figure.savefig(file, format="svg", metadata=about)
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    # Identifiers are hashes of numbers whose last digit depends on the processor.
    text = file.getvalue()
    for index, name in enumerate(dict.fromkeys(re.findall(r'<clipPath id="(\w+)"', text))):
        text = text.replace(name, f"clip{index}")
    dark = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>\n</svg>"
    lines = text.replace("</svg>", dark).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


@rc_context(STYLE)
def draw(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    marks: Mapping[float, str],
    x_name: str,
    y_name: str,
    **options: Any,
) -> str:
    """Return lines over marked places as SVG, named below; those without points are left out."""
    axes = plot(title, (5.2, 4.4))
    for index, (name, points) in enumerate(lines.items()):
        if points:
            again, at = divmod(index, len(COLOURS))
            form = {"marker": MARKERS[at], "ms": 5.5, "lw": 1.5, "color": COLOURS[at]}
            inner = PAPER if again else COLOURS[at]
            axes.plot(*zip(*points, strict=True), label=name, markerfacecolor=inner, **form)
    axes.set(yscale="log", xlabel=x_name, **options)
    axes.set_ylabel(y_name)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:f}".rstrip("0").rstrip("."))
    axes.set_xticks(list(marks), list(marks.values()), minor=False)
    axes.tick_params(which="minor", bottom=False)
    axes.figure.legend(loc="outside lower left", ncols=2, fontsize=9, frameon=False)
    return svg(axes)
