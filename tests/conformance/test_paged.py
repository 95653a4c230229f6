"""Methods go through the conformance kit in the paged cache, too.

A pool is allocated at once and shared by caches that were forked, so what the kit says of memory
that comes and goes is said here of the pool instead; each such check says why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, CompressedKVCache, create_cache
from kvpact.errors import CacheFull
from kvpact.testing import CacheContract
from kvpact.testing.cache_base import SMALL
from kvpact.testing.held import difference

SPECS = ["none", "int:bits=4", "turboquant:bits=3,center=64", "kivi:bits=2", "kvarn:bits=3"]


def row_tensors(view):
    """Return what the rows of a view hold: which pages it stands on is no part of it."""
    found = {}
    for row, seq in enumerate(view.seqs or ()):
        sequence = view.cache._sequence(seq)
        for index, layer in enumerate(sequence.layers):
            for name, stream in (("k", layer.k), ("v", layer.v)):
                if stream is None:
                    continue
                path = f"{row}.{index}.{name}"
                found[f"{path}.length"] = torch.tensor([stream.length, stream.packed])
                found[f"{path}.tail"] = stream.tail
                if stream.sinks is not None:
                    found[f"{path}.sinks"] = stream.sinks
                # What a shared page holds behind `packed` is another sequence's.
                pages = -(-stream.packed // view.cache.pool.page_size)
                for field in stream.codec.fields if pages else ():
                    units = stream.store.source().gather(field.name, 0, pages)
                    field.clear_from(units, stream.packed)
                    found[f"{path}.{field.name}"] = units
            if layer._padding is not None:
                found[f"{row}.{index}.padding"] = layer._padding
    return found


class PagedContract(CacheContract):
    """The kit with a pool of enough pages."""

    num_pages = 64

    def make_cache(self, geometry: CacheGeometry, max_tokens: int | None = None):
        if max_tokens is not None:
            pytest.skip("a pool has pages and no limit of tokens: see test_full")
        return create_cache(self.spec, geometry, layout="paged", num_pages=self.num_pages)

    def state(self, cache):
        """Contents of the rows: a fork lies in the same pool, on pages of its own numbers."""
        return {name: tensor.clone() for name, tensor in row_tensors(cache).items()}

    def assert_same(self, a, b):
        left, right = (x if isinstance(x, dict) else row_tensors(x) for x in (a, b))
        different = difference(left, right)
        assert not different, f"not the same bytes: {different}"

    def test_contract(self) -> None:
        """All but one thing: an empty cache holds its pool, and nothing else."""
        cache = self.make_cache(SMALL.geometry(2))
        assert isinstance(cache, CompressedKVCache)
        empty = cache.memory_usage()
        assert empty == sum(t.nbytes for t in cache.cache.pool.tensors())
        result = cache.prefill(1, *self.tokens(SMALL, 70), None)
        assert result.k.shape == (2, 2, 70, 32)
        assert result.v.shape == (2, 2, 70, 48)
        assert result.logit_bias is None
        output = cache.decode(1, *self.tokens(SMALL, 1, seed=1), AttendConfig()).output
        assert output.shape == (2, 4, 1, 48)
        assert output.dtype == SMALL.dtype
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 71]
        cache.reset()
        assert [cache.seq_len(layer) for layer in range(2)] == [0, 0]
        assert cache.memory_usage() == empty
        assert cache.cache.num_free_pages == self.num_pages
        cache.prefill(0, *self.tokens(replace(SMALL, batch=3), 5), None)
        assert cache.seq_len(0) == 5

    def test_little_is_unused(self) -> None:
        """A pool is allocated before there are tokens; of its pages in use, little is unused."""
        geometry = CacheGeometry(1, 1, 64, dtype=torch.float16)
        cache = create_cache(self.spec, geometry, layout="paged", num_pages=160)
        shape = replace(SMALL, batch=1, heads=1, dim=64, v_dim=64, dtype=torch.float16)
        for seed, count in enumerate((4096, 1, 127, 1)):
            self.append(cache, self.tokens(shape, count, seed))
            size = cache.cache.pool.page_size
            used = cache.cache.num_pages - cache.cache.num_free_pages
            assert used == -(-cache.seq_len(0) // size)
            assert used * size <= 1.05 * cache.seq_len(0)

    def test_full(self) -> None:
        """A pool counts pages: what would be too much isn't stored in part, what fits is."""
        probe = self.make_cache(SMALL.geometry(2))
        size = probe.cache.pool.page_size
        cache = create_cache(self.spec, SMALL.geometry(2), layout="paged", num_pages=4)
        self.append(cache, self.tokens(SMALL, 2 * size - 2))
        tokens = self.tokens(SMALL, 3, seed=1)
        for call in self._calls(cache):
            self._refused(cache, CacheFull, call, 0, *tokens, None)
        self.append(cache, self.tokens(SMALL, 2, seed=1))
        one = self.tokens(SMALL, 1, seed=1)
        self._refused(cache, CacheFull, cache.decode, 0, *one, AttendConfig())
        assert cache.seq_len(0) == 2 * size


def _classes():
    for spec in SPECS:
        name = "".join(part.capitalize() for part in spec.replace("=", " ").split())
        members = {"spec": spec, "__module__": __name__}
        yield f"TestPaged_{name}", type(f"TestPaged_{name}", (PagedContract,), members)


globals().update(_classes())
