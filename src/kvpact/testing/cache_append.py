"""Checks of appending: pieces against the whole, exact tokens, counts and bytes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvpact.cache import bytes_per_token, planned_bytes
from kvpact.contract import AttendConfig, CompressedKVCache, Dequantized, DequantResult, Fused
from kvpact.spec import parse_spec
from kvpact.testing.cache_base import SMALL, CacheKit, in_pieces
from kvpact.testing.data import Shape, by_name, integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import held_bytes, held_tensors, same_bytes


class AppendChecks(CacheKit):
    """Checks of a cache's contents after tokens were appended."""

    def test_contract(self) -> None:
        """The cache is a `CompressedKVCache`, and its calls return what the contract says."""
        cache, shape = self.make_cache(SMALL.geometry(2)), SMALL
        assert isinstance(cache, CompressedKVCache)
        for operation in self.operations:
            assert callable(getattr(cache, operation)), operation
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 0]
        assert cache.memory_usage() == self.empty_bytes(cache, SMALL.geometry(2))
        result = cache.prefill(1, *self.tokens(shape, 70), None)
        assert isinstance(result, DequantResult)
        assert result.k.shape == (2, 2, 70, 32)
        assert result.v.shape == (2, 2, 70, 48)
        assert result.logit_bias is None, "nothing is compressed yet, what could the bias be"
        output = cache.decode(1, *self.tokens(shape, 1, seed=1), AttendConfig())
        assert isinstance(output, Fused | Dequantized)
        if isinstance(output, Fused):
            assert output.output.shape == (2, 4, 1, 48)
            assert output.output.dtype == shape.dtype
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 71]
        cache.reset()
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 0]
        assert cache.memory_usage() == self.empty_bytes(cache, SMALL.geometry(2))
        cache.prefill(0, *self.tokens(Shape(3, 2, (), 32, 48, torch.float32), 5), None)
        assert cache.seq_len(0) == 5

    @depends_on("bytes")
    def test_pieces_are_the_whole(self, shape: Shape) -> None:
        """Appended in pieces or at once: the same bytes in every tensor that the cache holds."""
        whole = self.filled(shape, (shape.tokens,))
        pieces = self.filled(shape)
        assert pieces.seq_len(0) == whole.seq_len(0) == shape.tokens
        self.assert_same(whole, pieces)
        again = self.filled(shape, (shape.tokens,))
        self.assert_same(whole, again)

    @depends_on("bytes")
    def test_every_way_to_append_stores_the_same(self) -> None:
        """`prefill`, `attend` and `decode` store the same bytes, with queries and without."""
        self.needs("attend")
        caches = [self.make_cache(SMALL.geometry()) for _ in range(3)]
        for seed, count in enumerate((70, 1, 1, 130)):
            tokens = self.tokens(SMALL, count, seed)
            caches[0].prefill(0, *tokens[:2])
            caches[1].attend(0, **by_name(*tokens), config=None)
            (caches[2].decode if count == 1 else caches[2].prefill)(0, *tokens, AttendConfig())
        self.assert_same(caches[0], caches[1])
        self.assert_same(caches[0], caches[2])

    @depends_on("bytes")
    def test_rows_are_independent(self) -> None:
        """A row's numbers are those of a cache that holds this row alone."""
        both = self.filled(SMALL)
        k, v, q = self.tokens(SMALL, SMALL.tokens)
        probe = self.tokens(SMALL, 1, seed=99)
        shown = both.prefill(0, *probe, None)
        for row in range(SMALL.batch):
            one = slice(row, row + 1)
            alone = self.make_cache(SMALL.geometry())
            self.append(alone, (k[one], v[one], q[one]))
            result = alone.prefill(0, *(x[one] for x in probe), None)
            assert same_bytes(result.k, shown.k[one])
            assert same_bytes(result.v, shown.v[one])

    @depends_on("bytes")
    def test_tiles_are_k_and_v(self) -> None:
        """`tiles()` runs over all tokens in order and joins to `k`, `v` and `logit_bias`."""
        cache = self.filled(SMALL)
        result = cache.prefill(0, *self.tokens(SMALL, 300, seed=1), None)
        tiles = list(result.tiles())
        assert [tile.start for tile in tiles[1:]] == [tile.end for tile in tiles[:-1]]
        assert (tiles[0].start, tiles[-1].end) == (0, result.total)
        assert all(tile.k.shape[2] == tile.end - tile.start for tile in tiles)
        assert same_bytes(torch.cat([tile.k for tile in tiles], 2), result.k)
        assert same_bytes(torch.cat([tile.v for tile in tiles], 2), result.v)
        if result.logit_bias is not None:
            bias = torch.cat([tile.logit_bias for tile in tiles], -1)
            assert same_bytes(bias, result.logit_bias)

    @depends_on("bytes")
    def test_no_graph_is_kept(self) -> None:
        """Stored tensors are detached: a cache keeps no activations alive for a backward pass."""
        cache = self.make_cache(SMALL.geometry())
        for seed, count in enumerate((70, 1, 70)):
            k, v, q = self.tokens(SMALL, count, seed)
            cache.prefill(0, k.requires_grad_(), v.requires_grad_(), q, None)
        held = held_tensors(cache)
        assert not [path for path, tensor in held.items() if tensor.requires_grad]

    def test_layers_in_threads(self) -> None:
        """Layers that are filled at the same time hold what they hold when filled in turn."""
        cache, alone = (self.make_cache(SMALL.geometry(3)) for _ in range(2))

        def fill(filled: Any, layer: int) -> None:
            for seed, count in enumerate((70, 1, 1, 65)):
                self.append(filled, self.tokens(SMALL, count, 10 * layer + seed), layer=layer)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda layer: fill(cache, layer), range(3)))
        for layer in range(3):
            fill(alone, layer)
        self.assert_same(cache, alone)


class ExactChecks(CacheKit):
    """Checks of the tokens that read back as they were given."""

    @depends_on("bytes")
    def test_new_tokens_sinks_and_window_are_exact(self) -> None:
        """`prefill` shows new tokens, sinks and the window as they were given."""
        given, cache = self.tokens(SMALL, 330), self.make_cache(SMALL.geometry())
        start = 0
        for part in in_pieces(given, (70, 1, 129, 130)):
            end = start + part[0].shape[2]
            result = cache.prefill(0, *part, None)
            assert result.total == end
            shown = (result.k, result.v)
            for x, got, (sinks, window) in zip(given[:2], shown, self.exact_tokens(), strict=True):
                exact = [slice(start, end), slice(0, min(sinks, end))]
                exact.append(slice(max(start - window, 0), start))
                for where in exact:
                    assert same_bytes(got[:, :, where], x[:, :, where])
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
        """Sinks are each row's first tokens after its padding, in whatever pieces they come."""
        padding = integers(0, 5)
        config = AttendConfig(padding=padding)
        given = self.tokens(SMALL, 200)
        caches = [self.make_cache(SMALL.geometry()) for _ in range(2)]
        for part in in_pieces(given, (3, 4, 1, 192)):
            self.append(caches[0], part, config)
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
                sunk = slice(first, first + sinks)
                assert same_bytes(got[row, :, sunk], x[row, :, sunk])

    @depends_on("bytes")
    def test_attended_as_stored_is_stored_the_same(self) -> None:
        """`exact_new=False` changes what is attended, not what is stored; padding included."""
        self.needs("attend")
        caches = [self.make_cache(SMALL.geometry()) for _ in range(2)]
        for seed, count in enumerate((3, 70, 1, 130)):
            padding = integers(0, 5) if seed < 2 else None
            for exact, cache in zip((True, False), caches, strict=True):
                config = AttendConfig(padding=padding, exact_new=exact)
                cache.attend(0, **by_name(*self.tokens(SMALL, count, seed)), config=config)
        self.assert_same(*caches)


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
                assert stats["bits_per_value"] is None
        return counted

    @depends_on("bytes")
    def test_memory_is_what_is_held(self, shape: Shape) -> None:
        """After each piece, a rollback and a fork, all bytes held are counted."""
        cache = self.make_cache(shape.geometry())
        for part in in_pieces(self.tokens(shape, shape.tokens), shape.pieces):
            self.append(cache, part)
            if (held := cache.seq_len(0)) < 3 or held in (63, 65) or part[0].shape[2] > 1:
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
        """Whatever a cache keeps about padding counts among its bytes too."""
        cache = self.filled(SMALL, config=AttendConfig(padding=integers(0, 3)))
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
