"""kvpact's own methods."""

from functools import partial

from kvpact.evaluate import Contender

SPECS = (
    "int:bits=8",
    "trellis:bits=4",
    "turboquant:bits=4",
    "kvarn:bits=3",
    "trellis:bits=3",
    "trellis:bits=2",
)


def make(spec, model):
    """Return an empty cache of a spec."""
    from kvpact.integrations.transformers import CompressedCache

    return CompressedCache(model, spec)


CONTENDER = Contender(
    package="kvpact",
    caches={spec: partial(make, spec) for spec in SPECS},
    note="Layers with a sliding window stay exact, and count.",
)
