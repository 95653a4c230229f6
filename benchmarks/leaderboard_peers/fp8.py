"""transformers' QuantizedCache in 8-bit floating point, which needs no other package."""

from kvpact.evaluate import Contender
from leaderboard_peers.full_attention import CHANGED, quantized


def make(model):
    """Return an empty cache."""
    return quantized("fp8", "Fp8QuantizedLayer", model)


CONTENDER = Contender(
    package="transformers",
    caches={"QuantizedCache, fp8": make},
    changed=CHANGED,
)
