"""quantcore-ai: packed codes and fp32 norms."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from turboquant.hf_integration import make_turboquant_cache

    return make_turboquant_cache(model.config, bits=4, compress_values=True, verbose=False)


CONTENDER = Contender(
    package="quantcore-ai",
    requires=("quantcore-ai==0.4.2",),
    caches={"make_turboquant_cache, 4 bits": make},
    note="New tokens are coded before they are attended. V is coded, too, not so by default.",
)
