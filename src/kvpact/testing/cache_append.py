"""Checks of appending: the contract's five calls, pieces and the whole, what is exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
from kvpact.testing.depends import depends_on
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
    @every_shape
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
            caches[1].attend(0, *tokens, None)
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
        """What is stored is detached: a cache never keeps activations alive for a backward pass."""
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

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layers_are_independent(self, layer: int) -> None:
        """Tokens of one layer show in no other."""
        cache = self.make_cache(SMALL.geometry(3))
        self.append(cache, self.tokens(SMALL, 70), layer=layer)
        assert [cache.seq_len(i) for i in range(3)] == [70 * (i == layer) for i in range(3)]
