"""transformers' QuantizedCache over hqq."""

from kvpact.evaluate import Contender
from leaderboard_peers.full_attention import CHANGED, quantized


def make(model):
    """Return an empty cache."""
    return quantized("hqq", "HQQQuantizedLayer", model, nbits=4, axis_key=1, axis_value=1)


CONTENDER = Contender(
    package="hqq",
    requires=("hqq==0.2.8", "termcolor==3.1.0", "einops==0.8.1"),
    caches={"QuantizedCache, hqq, 4 bits": make},
    changed=CHANGED,
    note="Groups along axis 1, as transformers recommends for hqq. All tokens are quantised anew "
    "whenever 128 exact ones have come together.",
)
