"""What is compared: the specs that are measured, and the ladder that a recipe climbs."""

from __future__ import annotations

LADDER = (*(f"trellis:bits={bits}" for bits in range(2, 7)), "int:bits=8", "none")
"""What K or V of a layer may have in a recipe, from the fewest bytes to the most."""

CANDIDATES = (
    *LADDER[:-1],
    "turboquant:bits=4",
    "int:bits=4,group={head_dim},rotate=true",
    "kivi:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=3,center=64",
    "kivi:bits=2",
)
"""Specs for all layers: all of `LADDER` but ``none``, which costs nothing in quality, and others.
``{head_dim}`` is the width of the model's keys."""


def candidates(head_dim: int) -> list[str]:
    """Return the specs to be measured on a model whose keys have that width."""
    return [text.format(head_dim=head_dim) for text in CANDIDATES]
