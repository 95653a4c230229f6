"""Checks of appending: the contract's five calls, pieces and the whole, what is exact."""

from __future__ import annotations

import pytest
import torch

from kvpact.contract import (
    AttendConfig,
    CompressedKVCache,
    Dequantized,
    DequantResult,
    Fused,
)
from kvpact.testing.cache_base import SMALL, CacheKit, every_shape
from kvpact.testing.data import Shape
from kvpact.testing.held import held_tensors, same_bytes


class AppendChecks(CacheKit):
    """What a cache holds after tokens came."""

    def test_contract(self) -> None:
        """The cache is a `CompressedKVCache`, and its calls return what the contract says."""
        cache, shape = self.make_cache(SMALL.geometry(2)), SMALL
        assert isinstance(cache, CompressedKVCache)
        for operation in self.operations:
            assert callable(getattr(cache, operation)), operation
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 0]
        assert cache.memory_usage() == 0
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
        assert cache.memory_usage() == 0
        cache.prefill(0, *self.tokens(Shape(3, 2, (), 32, 48, torch.float32), 5), None)
        assert cache.seq_len(0) == 5

    @every_shape
    def test_pieces_are_the_whole(self, shape: Shape) -> None:
        """Appended in pieces or at once: the same bytes in every tensor that the cache holds."""
        whole = self.filled(shape, (shape.tokens,))
        pieces = self.filled(shape)
        assert pieces.seq_len(0) == whole.seq_len(0) == shape.tokens
        self.assert_same(whole, pieces)
        again = self.filled(shape, (shape.tokens,))
        self.assert_same(whole, again)

    def test_every_way_to_append_stores_the_same(self) -> None:
        """`prefill`, `attend` and `decode` store the same bytes."""
        self.needs("attend")
        caches = [self.make_cache(SMALL.geometry()) for _ in range(3)]
        for seed, count in enumerate((70, 1, 1, 130)):
            tokens = self.tokens(SMALL, count, seed)
            caches[0].prefill(0, *tokens, None)
            caches[1].attend(0, *tokens, None)
            (caches[2].decode if count == 1 else caches[2].prefill)(0, *tokens, AttendConfig())
        self.assert_same(caches[0], caches[1])
        self.assert_same(caches[0], caches[2])

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

    def test_a_stored_token_never_changes(self) -> None:
        """Once a token is shown as stored, it is shown the same for ever: no requantisation."""
        self.needs("fork")
        cache = self.make_cache(SMALL.geometry())
        groups, exact = self.groups(), self.exact_tokens()
        held: list[torch.Tensor] = []
        for seed, count in enumerate((300, 1, 31, 64, 1, 129)):
            self.append(cache, self.tokens(SMALL, count, seed))
            now = self.read(cache, SMALL)
            for before, after in zip(held, now, strict=False):
                kept = before.shape[2]
                assert same_bytes(after[:, :, :kept], before)
            stored = [cache.seq_len(0) - e[1] - g + 1 for e, g in zip(exact, groups, strict=True)]
            held = [x[:, :, : max(end, 0)].clone() for x, end in zip(now, stored, strict=True)]

    def test_padding_is_never_a_sink(self) -> None:
        """Sinks are each row's first tokens behind its padding, in whatever pieces they come."""
        padding = torch.tensor([0, 5])
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

    def test_attended_as_stored_is_stored_the_same(self) -> None:
        """`exact_new=False` changes what is attended, not what is stored; padding included."""
        self.needs("attend")
        caches = [self.make_cache(SMALL.geometry()) for _ in range(2)]
        for seed, count in enumerate((3, 70, 1, 130)):
            padding = torch.tensor([0, 5]) if seed < 2 else None
            for exact, cache in zip((True, False), caches, strict=True):
                config = AttendConfig(padding=padding, exact_new=exact)
                cache.attend(0, *self.tokens(SMALL, count, seed), config)
        self.assert_same(*caches)

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

    def test_no_graph_is_kept(self) -> None:
        """What is stored is detached: a cache never keeps activations alive for a backward pass."""
        cache = self.make_cache(SMALL.geometry())
        for seed, count in enumerate((70, 1, 70)):
            k, v, q = self.tokens(SMALL, count, seed)
            cache.prefill(0, k.requires_grad_(), v.requires_grad_(), q, None)
        held = held_tensors(cache)
        assert not [path for path, tensor in held.items() if tensor.requires_grad]

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layers_are_independent(self, layer: int) -> None:
        """Tokens of one layer show in no other."""
        cache = self.make_cache(SMALL.geometry(3))
        self.append(cache, self.tokens(SMALL, 70), layer=layer)
        assert [cache.seq_len(i) for i in range(3)] == [70 * (i == layer) for i in range(3)]
