"""What is compared: the specs that are measured, and the ladder that a recipe climbs."""

from __future__ import annotations

CANDIDATES = (
    "int:bits=8",
    "trellis:bits=4",
    "turboquant:bits=4",
    "int:bits=4,group={head_dim},rotate=true",
    "kivi:bits=4",
    "trellis:bits=3",
    "turboquant:bits=3",
    "turboquant:bits=3,center=64",
    "trellis:bits=2",
    "kivi:bits=2",
)
"""Specs for all layers; ``{head_dim}`` is the width of the model's keys."""

LADDER = ("trellis:bits=2", "trellis:bits=3", "trellis:bits=4", "int:bits=8", "none")
"""What a layer of a recipe may have, from the fewest bytes to the most; all but ``none``, which
costs nothing in quality, are among `CANDIDATES`."""


def candidates(head_dim: int) -> list[str]:
    """Return the specs to be measured on a model whose keys have that width."""
    return [text.format(head_dim=head_dim) for text in CANDIDATES]
