"""What a third party writes; run by test_third_party.py in a process of its own."""

import kvpact_listcache

from kvpact.testing import (
    CacheContract,
    FittedCacheContract,
    FittedMethodContract,
    FittedPagedCacheContract,
    MethodContract,
    PagedCacheContract,
)


class TestTernary(MethodContract):
    spec = "ternary"
    max_relative_error = 0.6


class TestTernaryInACache(CacheContract):
    spec = "ternary:window=8/turboquant:bits=4"


class TestListCache(CacheContract):
    operations = ("truncate", "fork")

    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.ListCache(geometry, max_tokens)


class TestDrifting(MethodContract):
    spec = "ternary_drifting"


class TestDriftingInACache(CacheContract):
    spec = "ternary_drifting:window=8"


class TestHiding(MethodContract):
    spec = "ternary_hiding"


class TestHidingInACache(CacheContract):
    spec = "ternary_hiding"


class TestNotANumber(MethodContract):
    spec = "ternary_nan"


class TestUndeclared(MethodContract):
    spec = "ternary_undeclared"


class TestThawed(MethodContract):
    spec = "ternary_thawed"


class TestBlank(MethodContract):
    spec = "ternary_blank"


class TestDirty(MethodContract):
    spec = "ternary_dirty"


class TestSharingFork(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.SharingFork(geometry, max_tokens)


class TestUndercounting(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.Undercounting(geometry, max_tokens)


class TestHalfStoring(TestListCache):
    def make_cache(self, geometry, max_tokens=None):
        return kvpact_listcache.HalfStoring(geometry, max_tokens)


class TestTernaryOnPages(PagedCacheContract):
    spec = "ternary"


class TestScaled(FittedMethodContract):
    spec = "scaled"
    max_relative_error = 0.6


class TestScaledInACache(FittedCacheContract):
    spec = "scaled:window=8"


class TestScaledOnPages(FittedPagedCacheContract):
    spec = "scaled/turboquant:bits=4"


class TestRelearning(FittedMethodContract):
    spec = "scaled_relearning"


class TestRelearningOnPages(FittedPagedCacheContract):
    spec = "scaled_relearning"


class TestInPlace(FittedMethodContract):
    spec = "scaled_in_place"


class TestSecret(FittedMethodContract):
    spec = "scaled_secret"


class TestSecretInACache(FittedCacheContract):
    spec = "scaled_secret"


class TestTrusting(FittedMethodContract):
    spec = "scaled_trusting"
