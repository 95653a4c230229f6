"""`CacheContract`: what a cache has to keep to."""

from __future__ import annotations

from kvpact.testing.cache_append import AppendChecks, ByteChecks, ExactChecks
from kvpact.testing.cache_attention import AttentionChecks
from kvpact.testing.cache_changes import ForkChecks, RollbackChecks, RowChecks, SnapshotChecks
from kvpact.testing.cache_input import InputChecks
from kvpact.testing.cache_modes import ModeChecks


class CacheContract(
    AppendChecks,
    ExactChecks,
    RollbackChecks,
    ForkChecks,
    RowChecks,
    SnapshotChecks,
    ByteChecks,
    AttentionChecks,
    InputChecks,
    ModeChecks,
):
    """Inherit this in a test module; pytest does the rest.

    To test a method inside kvpact's own cache, set `spec`. To test a cache of one's own, override
    `make_cache` (and `exact_tokens` and `groups`, if `spec` doesn't say them).

    Attributes
    ----------
    spec : str
        The spec that `make_cache` makes a cache of.
    operations : tuple of str
        Calls of `EngineCache` besides those of `CompressedKVCache`. Leave out what the cache lacks,
        and the checks that need it are skipped.

    Notes
    -----
    A conforming cache stores the same bytes however tokens are cut into pieces; after a rollback
    is as if the tokens had never come; is independent of its forks; rearranges rows without
    touching them; counts every byte that can be reached from it; attends exactly over what
    `prefill` shows; and after a named error is, byte by byte, as before.
    """
