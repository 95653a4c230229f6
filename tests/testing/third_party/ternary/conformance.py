"""What a third party writes; run by test_third_party.py in a process of its own."""

import kvpact_listcache

from kvpact.testing import (
    SHAPES,
    CacheContract,
    FittedCacheContract,
    FittedMethodContract,
    FittedPagedCacheContract,
    MethodContract,
    PagedCacheContract,
    without,
)

FEW = SHAPES[1:5:3]
"""Enough of parts that are right."""


class TestTernary(MethodContract):
    spec = "ternary"
    shapes = FEW
    max_relative_error = 0.6


class TestScaled(FittedMethodContract):
    spec = "scaled"
    shapes = FEW
    max_relative_error = 0.6


class TestListCache(CacheContract):
    operations = ("truncate", "fork")

    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.ListCache(geometry, max_tokens)


class TestSharingFork(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.SharingFork(geometry, max_tokens)


class TestUndercounting(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.Undercounting(geometry, max_tokens)


class TestHalfStoring(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.HalfStoring(geometry, max_tokens)


def stored(contract, spec):
    """Make the checks of a second spec: those that depend on what is stored."""
    members = {"spec": spec, "shapes": FEW}
    return type(contract.__name__, (contract,), without(contract, bool) | members)


TestTernaryInACache = stored(CacheContract, "ternary:window=8/turboquant:bits=4")
TestScaledInACache = stored(FittedCacheContract, "scaled:window=8")
TestTernaryOnPages = stored(PagedCacheContract, "ternary")
TestScaledOnPages = stored(FittedPagedCacheContract, "scaled/turboquant:bits=4")

BROKEN = {
    "Drifting": (MethodContract, "ternary_drifting"),
    "DriftingInACache": (CacheContract, "ternary_drifting:window=8"),
    "Hiding": (MethodContract, "ternary_hiding"),
    "HidingInACache": (CacheContract, "ternary_hiding"),
    "NotANumber": (MethodContract, "ternary_nan"),
    "Undeclared": (MethodContract, "ternary_undeclared"),
    "Thawed": (MethodContract, "ternary_thawed"),
    "Blank": (MethodContract, "ternary_blank"),
    "Dirty": (MethodContract, "ternary_dirty"),
    "Relearning": (FittedMethodContract, "scaled_relearning"),
    "RelearningOnPages": (FittedPagedCacheContract, "scaled_relearning"),
    "InPlace": (FittedMethodContract, "scaled_in_place"),
    "Secret": (FittedMethodContract, "scaled_secret"),
    "SecretInACache": (FittedCacheContract, "scaled_secret"),
    "Trusting": (FittedMethodContract, "scaled_trusting"),
}
globals().update(
    (f"Test{name}", type(f"Test{name}", (contract,), {"spec": spec}))
    for name, (contract, spec) in BROKEN.items()
)
