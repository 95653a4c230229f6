"""Checks of the accounting: bytes are bytes."""

from __future__ import annotations

from math import isnan
from typing import Any

import torch

from kvpact.cache import bytes_per_token, planned_bytes
from kvpact.contract import AttendConfig
from kvpact.spec import parse_spec
from kvpact.testing.cache_base import SMALL, CacheKit, every_shape
from kvpact.testing.data import Shape, integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import held_bytes

LONG = Shape(1, 1, (4096, 1, 127, 1), 64, 64, torch.float16)


class ByteChecks(CacheKit):
    """`memory_usage`, `stats` and the plan against what can be reached from the cache."""

    def assert_counted(self, cache: Any, shape: Shape) -> int:
        """Check a cache's own count; return it."""
        counted = int(cache.memory_usage())
        # What a new cache holds too (tables made once) belongs to the process.
        held = held_bytes(cache, constants=self.make_cache(shape.geometry()))
        assert counted == held, f"memory_usage() says {counted} bytes, {held} are held"
        if "stats" in self.operations:
            stats = cache.stats()
            sizes = dict(stats["bytes"])
            assert sizes.pop("total") == counted
            assert sum(sizes.values()) == counted
            assert min(sizes.values()) >= 0
            if stats["values"]:
                assert abs(stats["bits_per_value"] * stats["values"] - 8 * counted) < 1e-6 * counted
            else:
                assert isnan(stats["bits_per_value"])
        return counted

    @depends_on("bytes")
    @every_shape
    def test_memory_is_what_is_held(self, shape: Shape) -> None:
        """After each piece, a rollback and a fork, all bytes held are counted."""
        cache = self.make_cache(shape.geometry())
        k, v, q = self.tokens(shape, shape.tokens)
        start = 0
        for count in shape.pieces:
            part = slice(start, start + count)
            self.append(cache, (k[:, :, part], v[:, :, part], q[:, :, part]))
            start += count
            if start < 3 or start in (63, 65) or count > 1:
                self.assert_counted(cache, shape)
        # What codecs learn decides on their fields: nothing can be planned before.
        if (streams := self.streams(cache)) and not self.calibration(shape.geometry()):
            plan = planned_bytes(parse_spec(self.spec), shape.geometry(), shape.tokens, shape.batch)
            assert plan["total"] == cache.memory_usage() - sum(stream.room for stream in streams)
        if "fork" in self.operations:
            fork = cache.fork()
            self.append(fork, self.tokens(shape, 1, seed=1))
            self.assert_counted(fork, shape)
        if "truncate" in self.operations:
            for kept in (shape.tokens // 2 + 1, shape.tokens // 2, 0):
                cache.truncate(kept)
                self.assert_counted(cache, shape)

    def test_padding_is_counted(self) -> None:
        """What a cache keeps about padding is held too."""
        cache = self.filled(
            SMALL,
            config=AttendConfig(padding=integers(0, 3)),
        )
        self.assert_counted(cache, SMALL)

    @depends_on("bytes")
    def test_stats_name_what_is_there(self) -> None:
        """Tokens, values and the parts of the bytes."""
        self.needs("stats")
        cache = self.filled(SMALL, layers=2)
        stats = cache.stats()
        assert stats["tokens"] == SMALL.tokens
        assert stats["values"] == 2 * SMALL.batch * SMALL.heads * SMALL.tokens * (32 + 48)
        if streams := self.streams(cache):
            assert stats["spec"] == str(parse_spec(self.spec))
            held = bytes_per_token(parse_spec(self.spec), SMALL.geometry(2))
            k, v = (sum(stream.packed for stream in streams[side::2]) for side in (0, 1))
            # What codecs learn takes bytes besides.
            if k + v and not any(stream.codec.state() for stream in streams):
                used, values = k * held["key_bytes"] + v * held["value_bytes"], k * 32 + v * 48
                assert abs(stats["slot_bits_per_value"] - 8 * used / (2 * values)) < 1e-9

    @depends_on("bytes")
    def test_little_is_unused(self) -> None:
        """Above 4,096 tokens at most 5 % of the bytes are unused."""
        self.needs("stats")
        cache = self.make_cache(LONG.geometry())
        for seed, count in enumerate(LONG.pieces):
            self.append(cache, self.tokens(LONG, count, seed))
            sizes = cache.stats()["bytes"]
            if cache.seq_len(0) > 4096:
                assert sizes["unused"] <= 0.05 * sizes["total"]
