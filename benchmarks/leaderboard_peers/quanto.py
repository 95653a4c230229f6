"""transformers' QuantizedCache over optimum-quanto."""

from kvpact.evaluate import Contender
from leaderboard_peers.full_attention import CHANGED, quantized


def make(model):
    """Return an empty cache."""
    return quantized("quanto", "QuantoQuantizedLayer", model, nbits=4)


CONTENDER = Contender(
    package="optimum-quanto",
    requires=("optimum-quanto==0.2.7", "ninja==1.13.2"),
    caches={"QuantizedCache, quanto, 4 bits": make},
    changed=CHANGED,
    note="All tokens are quantised anew whenever 128 exact ones have come together.",
)
