"""turboquant: codes beside a dense copy."""

from kvpact.evaluate import Contender


def make(model):
    """Return an empty cache."""
    import numpy

    # turboquant 0.2.0 calls what NumPy 2.4 took out under this name.
    if not hasattr(numpy, "trapz"):
        numpy.trapz = numpy.trapezoid
    from turboquant.cache import TurboQuantCache

    return TurboQuantCache(bits=4)


CONTENDER = Contender(
    package="turboquant",
    requires=("turboquant==0.2.0",),
    caches={"TurboQuantCache, 4 bits": make},
    changed="numpy.trapz, which NumPy 2.4 no longer has, is put in its place",
    note="Decompressed K and V are held beside the codes, so it holds more than no compression.",
)
