"""turbokv: rotated 4-bit codes in transformers' QuantizedLayer, the first layer exact."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from turboquant import TurboQuantCache

    return TurboQuantCache(model.config, nbits=4, device="cpu")


CONTENDER = Contender(
    package="turbokv",
    requires=("turbokv==0.1.0",),
    caches={"TurboQuantCache, 4 bits": make},
    note="Layer 0 is exact, and all tokens of the others are quantised anew whenever 128 exact "
    "ones have come together. On Gemma 3 "
    "layers with sliding windows keep all tokens, coded, and not exact ones of the window.",
)
