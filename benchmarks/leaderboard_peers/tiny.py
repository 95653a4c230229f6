"""tiny-turboquant: K per channel, V per token, packed, in blocks of 128 tokens."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from tiny_turboquant.cache import TinyKVCache

    return TinyKVCache.for_model(model, compression="safe")


CONTENDER = Contender(
    package="tiny-turboquant",
    requires=("tiny-turboquant==0.18.0",),
    caches={"TinyKVCache, safe (4 bits)": make},
    note="128 to 255 tokens are exact, most of what short contexts hold. On Gemma 3 "
    "layers with sliding windows keep all tokens, coded, and not exact ones of the window.",
)
