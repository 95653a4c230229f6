"""How near a backend's attention must be to the torch body's."""

from functools import cache

import torch

from kvpact.methods import Codec
from kvpact.spec import parse_spec
from kvpact.testing.backend import whole_levels

BOUND = 1e-6
"""Norm of the difference over the norm of the torch body's output, fp32 in and out."""
WHOLE_BOUND = 5e-4
"""The same where the CPU's kernels attend in whole numbers: queries and weights have 16 bits."""
WHOLE_BITS = 2, 3, 4, 8
"""Of codes whose levels are whole numbers; those of a trellis have any."""


def error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the relative error of the norm; NaN where there is one."""
    return float((expected - found).norm() / expected.norm().clamp(min=1e-30))


@cache
def bound_of(spec: str, way: str = "few") -> float:
    """Return which of the two bounds holds."""
    if way != "few":
        return BOUND
    codecs = parse_spec(spec).codecs(64, 64, torch.float32)
    return WHOLE_BOUND if any(map(rounds_queries, codecs)) else BOUND


def rounds_queries(codec: Codec) -> bool:
    """Return whether the CPU's kernels attend over such slots in whole numbers."""
    form = codec.form
    return whole_levels(codec) and (form.trellis is not None or form.bits in WHOLE_BITS)
