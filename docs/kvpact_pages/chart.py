"""Charts of a few series over two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvpact_pages.svg import COLOURS, Drawing

WIDTH, LEFT, TOP, PLOT = 400.0, 44.0, 38.0, 220.0


class Series(NamedTuple):
    """Points (x, y, what is told of it) in one colour; behind the last colour, as rings."""

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int


class Axis(NamedTuple):
    """From where to where, with which marks; `log` for a logarithmic one."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def decades(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis of whole powers of ten around values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    marks = [(10.0**power, f"{10.0**power:g}") for power in range(low, high + 1)]
    return Axis(10.0**low, 10.0**high, marks, log=True)


def draw(title: str, series: Sequence[Series], x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    """Return a chart as SVG, with its series named below it."""
    rows = -(-len(series) // 2)
    picture = Drawing(WIDTH, TOP + PLOT + 46 + 17 * rows, f"{title}; {y_name} over {x_name}")
    right, foot = WIDTH - LEFT - 14, TOP + PLOT

    def at(across: float, up: float) -> tuple[float, float]:
        return LEFT + right * x.place(across), foot - PLOT * y.place(up)

    picture.text(12, 16, title, "head")
    picture.text(12, TOP - 8, y_name, "small")
    for value, name in x.marks:
        across = at(value, y.low)[0]
        picture.line(across, TOP, across, foot, "grid")
        picture.text(across, foot + 13, name, "small", "middle")
    for value, name in y.marks:
        up = at(x.low, value)[1]
        picture.line(LEFT, up, LEFT + right, up, "grid")
        picture.text(LEFT - 5, up + 3.5, name, "small", "end")
    picture.text(LEFT + right, foot + 27, x_name, "small", "end")
    for index, one in enumerate(series):
        colour, ring = f"c{one.colour % len(COLOURS)}", one.colour >= len(COLOURS)
        kind = f"{colour} {'ring' if ring else 'fill'}"
        places = [(*at(across, up), told) for across, up, told in one.points]
        if len(places) > 1:
            picture.path([(across, up) for across, up, _ in places], f"{colour} line")
        for across, up, told in places:
            picture.dot(across, up, kind, told)
        left = 18 + (index % 2) * (WIDTH - 30) / 2
        up = foot + 46 + 17 * (index // 2)
        picture.dot(left, up - 3.5, kind)
        picture.text(left + 9, up, one.name, "name")
    return picture.svg()
