"""Pictures as text: a few shapes, in colours that can be read on light and on dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#c65102", "#00805e", "#b14f93", "#7d6300", "#2a8fbd", "#5d3a9b", "#666666")
_DARK = ("#58b2e8", "#ff9a57", "#35cf9f", "#e69cc9", "#d9b93a", "#8fd6ff", "#b99af0", "#aaaaaa")


def _style() -> str:
    light = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(COLOURS))
    dark = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(_DARK))
    return (
        "text{font:11px system-ui,sans-serif;fill:var(--ink)}"
        ".small{font-size:10px;fill:var(--muted)}.name{font-size:10px}.head{font-weight:600}"
        ".page{fill:var(--page)}.grid{stroke:var(--grid);fill:none}"
        ".rule{stroke:var(--muted);fill:none}.faint{opacity:.28}"
        ".fill{fill:var(--c)}.line{stroke:var(--c);fill:none;stroke-width:1.6}"
        ".ring{stroke:var(--c);fill:var(--page);stroke-width:1.2}"
        f"svg{{--ink:#222;--muted:#666;--grid:#e2e2e2;--page:#fff}}{light}"
        "@media(prefers-color-scheme:dark){"
        f"svg{{--ink:#e4e4e4;--muted:#a3a3a3;--grid:#3a3a3a;--page:#1b1c1e}}{dark}}}"
    )


class Drawing:
    """A picture that is written from top to bottom.

    Parameters
    ----------
    width, height : float
        In pixels; what shows it may scale it.
    title : str
        Read out to who can't see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self._title = width, height, title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" {size} class="{kind}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        """Draw a straight line."""
        ends = f'x1="{_n(x)}" y1="{_n(y)}" x2="{_n(to_x)}" y2="{_n(to_y)}"'
        self._parts.append(f'<line {ends} class="{kind}"/>')

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        drawn = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{drawn}" class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str, told: str = "") -> None:
        """Draw a point; `told` is shown where a pointer rests on it."""
        inner = f"<title>{escape(told)}</title>" if told else ""
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3.6" class="{kind}">{inner}</circle>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text whose foot is at `y`."""
        where = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        named = f' class="{kind}"' if kind else ""
        self._parts.append(f"<text {where}{named}>{escape(text)}</text>")

    def svg(self) -> str:
        """Return the picture."""
        width, height = _n(self.width), _n(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">'
        )
        inner = [f"<title>{escape(self._title)}</title>", f"<style>{_style()}</style>"]
        inner.append(f'<rect width="{width}" height="{height}" rx="6" class="page"/>')
        return "\n".join([head, *inner, *self._parts, "</svg>"]) + "\n"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
