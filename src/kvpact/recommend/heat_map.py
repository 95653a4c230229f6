"""A picture of what errors cost by layer and side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from kvpact.evaluate.canvas import INK, new_figure

SIDES = ("key", "value")
Slot = tuple[int, str]
"""A layer, and ``key`` or ``value``."""


def save_heat_map(
    costs: Mapping[str, Sequence[Mapping[int, float]]],
    choice: Mapping[Slot, str],
    path: str | PathLike[str],
) -> None:
    """Draw the KL that each spec costs in K and in V of each layer, dots at what was chosen.

    `costs`: spec -> layer -> nats per token, of K and of V. `path`: a PNG, SVG or PDF.
    """
    figure = new_figure((11, 7))
    from matplotlib.colors import LogNorm

    specs, layers = list(costs), sorted(next(iter(costs.values()))[0])
    known = [x for pair in costs.values() for side in pair for x in side.values() if x > 0]
    norm = LogNorm(min(known, default=0.1), max(known, default=1.0))
    for place, side in enumerate(SIDES):
        axes: Any = figure.add_subplot(2, 1, place + 1)
        grid = [[costs[spec][place][layer] for layer in layers] for spec in specs]
        image = axes.imshow(grid, norm=norm, cmap="YlOrRd", aspect="auto")
        dots = [(layers.index(at), specs.index(spec)) for (at, of), spec in choice.items()
                if of == side and spec in costs]  # fmt: skip
        axes.plot(*zip(*dots, strict=True), "o", color=INK, ms=4) if dots else None
        axes.set_title(f"{'KV'[place]}; dots: what was chosen", loc="left", fontsize=11, color=INK)
        axes.set_xticks(range(len(layers)), layers)
        axes.set_yticks(range(len(specs)), specs, fontsize=8)
    axes.set_xlabel("layer")
    figure.colorbar(image, ax=figure.axes, label="predicted KL, nats per token")
    figure.savefig(path, bbox_inches="tight")
