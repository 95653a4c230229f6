"""Checks of what is exact: new tokens, sinks, window; and of what is stored, for ever."""

from __future__ import annotations

import torch

from kvpact.contract import AttendConfig
from kvpact.testing.cache_base import SMALL, CacheKit
from kvpact.testing.data import integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import same_bytes


class ExactChecks(CacheKit):
    """Which tokens read back as they were given."""

    @depends_on("bytes")
    def test_new_tokens_sinks_and_window_are_exact(self) -> None:
        """`prefill` shows new tokens, sinks and the window as they were given."""
        given, cache = self.tokens(SMALL, 330), self.make_cache(SMALL.geometry())
        start = 0
        for count in (70, 1, 129, 130):
            end = start + count
            k, v, q = (x[:, :, start:end] for x in given)
            result = cache.prefill(0, k, v, q, None)
            assert result.total == end
            shown = (result.k, result.v)
            for x, got, (sinks, window) in zip(given[:2], shown, self.exact_tokens(), strict=True):
                exact = [slice(start, end), slice(0, min(sinks, end))]
                exact.append(slice(max(start - window, 0), start))
                for part in exact:
                    assert same_bytes(got[:, :, part], x[:, :, part])
            start = end

    @depends_on("bytes")
    def test_a_stored_token_never_changes(self) -> None:
        """Once a token is shown as stored, it is shown the same for ever: no requantisation."""
        self.needs("fork")
        cache = self.make_cache(SMALL.geometry())
        units, exact = self.units(), self.exact_tokens()
        held: list[torch.Tensor] = []
        for seed, count in enumerate((300, 1, 31, 64, 1, 129)):
            self.append(cache, self.tokens(SMALL, count, seed))
            now = self.read(cache, SMALL)
            for before, after in zip(held, now, strict=False):
                kept = before.shape[2]
                assert same_bytes(after[:, :, :kept], before)
            stored = [cache.seq_len(0) - e[1] - g + 1 for e, g in zip(exact, units, strict=True)]
            held = [x[:, :, : max(end, 0)].clone() for x, end in zip(now, stored, strict=True)]

    @depends_on("bytes")
    def test_padding_is_never_a_sink(self) -> None:
        """Sinks are each row's first tokens behind its padding, in whatever pieces they come."""
        padding = integers(0, 5)
        config = AttendConfig(padding=padding)
        given = self.tokens(SMALL, 200)
        pieces = (3, 4, 1, 192)
        caches = [self.make_cache(SMALL.geometry()) for _ in range(2)]
        start = 0
        for count in pieces:
            part = slice(start, start + count)
            self.append(caches[0], tuple(x[:, :, part] for x in given), config)  # type: ignore[arg-type]
            start += count
        self.append(caches[1], given, config)
        self.assert_same(*caches)
        # What is known of a row that holds real tokens isn't changed by a later call.
        more, other = self.tokens(SMALL, 9, seed=2), AttendConfig(padding=padding + 1)
        self.append(caches[0], more, other)
        self.append(caches[1], more)
        self.assert_same(*caches)
        result = caches[0].prefill(0, *self.tokens(SMALL, 1, seed=1), config)
        for x, got, (sinks, _) in zip(
            given[:2], (result.k, result.v), self.exact_tokens(), strict=True
        ):
            for row, first in enumerate(padding.tolist()):
                part = slice(first, first + sinks)
                assert same_bytes(got[row, :, part], x[row, :, part])

    @depends_on("bytes")
    def test_attended_as_stored_is_stored_the_same(self) -> None:
        """`exact_new=False` changes what is attended, not what is stored; padding included."""
        self.needs("attend")
        caches = [self.make_cache(SMALL.geometry()) for _ in range(2)]
        for seed, count in enumerate((3, 70, 1, 130)):
            padding = integers(0, 5) if seed < 2 else None
            for exact, cache in zip((True, False), caches, strict=True):
                config = AttendConfig(padding=padding, exact_new=exact)
                cache.attend(0, *self.tokens(SMALL, count, seed), config)
        self.assert_same(*caches)
