"""The public conformance kit: the contracts of methods, caches and stores as pytest classes.

::

    from kvpact.testing import CacheContract, MethodContract

    class TestMine(MethodContract):         # the codecs, their slots, their bytes
        spec = "mine:bits=4"

    class TestMyCache(CacheContract):       # a cache of one's own
        def make_cache(self, geometry, max_tokens=None):
            return MyCache(geometry, max_tokens)

`CacheContract` and `PagedCacheContract` with a `spec` test a method inside kvpact's own caches. A
method that learns from tokens first inherits `FittedMethodContract`, `FittedCacheContract` and
`FittedPagedCacheContract`. A second spec of the same kind need not go through what depends on no
number: `without` leaves checks out, by what they depend on (`depends_on`).

Needs pytest, but for `held_bytes`, `held_tensors` and `same_bytes`. Every check is a method whose
name begins with ``test_``; a subclass sets a few class attributes, which each contract lists, and
changes nothing else.
"""

from importlib.util import find_spec

from kvpact.testing.held import held_bytes, held_tensors, same_bytes

if find_spec("pytest") is not None:
    from kvpact.testing._asserts import CHECKED as CHECKED
    from kvpact.testing.backend import BackendContract
    from kvpact.testing.cache import CacheContract
    from kvpact.testing.cache_paged import PagedCacheContract
    from kvpact.testing.data import SHAPES, Shape, random_offset, random_tokens
    from kvpact.testing.depends import depends_on, without
    from kvpact.testing.fitted import (
        FittedCacheContract,
        FittedMethodContract,
        FittedPagedCacheContract,
    )
    from kvpact.testing.method import MethodContract
    from kvpact.testing.oracle import LayerOracle, StreamOracle
    from kvpact.testing.reference import reference_attention
    from kvpact.testing.specs import example_specs, method_specs, variant_specs
    from kvpact.testing.store import StoreContract
else:

    def __getattr__(name: str) -> object:
        """Say what is missing."""
        if name in __all__:
            raise ModuleNotFoundError(f"kvpact.testing.{name} needs pytest: pip install pytest")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "SHAPES",
    "BackendContract",
    "CacheContract",
    "FittedCacheContract",
    "FittedMethodContract",
    "FittedPagedCacheContract",
    "LayerOracle",
    "MethodContract",
    "PagedCacheContract",
    "Shape",
    "StoreContract",
    "StreamOracle",
    "depends_on",
    "example_specs",
    "held_bytes",
    "held_tensors",
    "method_specs",
    "random_offset",
    "random_tokens",
    "reference_attention",
    "same_bytes",
    "variant_specs",
    "without",
]
