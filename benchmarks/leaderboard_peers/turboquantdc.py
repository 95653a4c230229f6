"""turboquantdc: a cache that does what transformers before 5 asked of one."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    from turboquantdc.hf_integration import TurboQuantCache

    return TurboQuantCache(bits=4)


CONTENDER = Contender(
    package="turboquantdc",
    requires=("turboquantdc==0.2.0",),
    caches={"TurboQuantCache, 4 bits": make},
)
