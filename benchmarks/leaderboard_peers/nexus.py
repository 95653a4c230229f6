"""nexusquant-kv: a round trip of prompts through a lattice into dense tensors."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from nexusquant.integrations.quantized_cache import E8QuantizedCache

    return E8QuantizedCache.from_model(model, key_bits=3, value_bits=2)


CONTENDER = Contender(
    package="nexusquant-kv",
    requires=("nexusquant-kv==0.6.3", "zstandard==0.25.0"),
    caches={"E8QuantizedCache, K 3, V 2 bits": make},
    note="Dense K and V are held: nothing is saved. Prompts are coded before they are attended, "
    "single tokens are never coded.",
)
