"""The base of the checks of a cache: making, filling and reading one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvpact.cache import create_cache
from kvpact.cache.stream.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError
from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset
from kvpact.spec import parse_spec
from kvpact.testing.data import Shape, ShapeKit, random_tokens
from kvpact.testing.held import difference, held_tensors

SMALL = Shape(2, 2, (70, 1, 64), 32, 48, torch.float32)
"""For checks to which the widths don't matter: two rows, a group of 128 and one of 64 cut."""

Tokens = tuple[Tensor, Tensor, Tensor]
Learnt = tuple[dict[str, Tensor], dict[str, Tensor]]


def in_pieces(tokens: Tokens, pieces: Iterable[int]) -> Iterator[Tokens]:
    """Yield k, v and q piece by piece."""
    return zip(*(torch.split(x, list(pieces), 2) for x in tokens), strict=True)


class CacheKit(ShapeKit):
    """The cache under test; `CacheContract` says what its attributes are."""

    spec: ClassVar[str] = "none"
    operations: ClassVar[tuple[str, ...]] = (
        *("attend", "store", "truncate", "fork", "select", "reorder", "repeat"),
        *("stats", "snapshot"),
    )

    def make_cache(self, geometry: CacheGeometry, max_tokens: int | None = None) -> Any:
        """Return a new empty cache; override this to test a cache of your own."""
        return create_cache(self.spec, geometry, max_tokens=max_tokens, **self.options(geometry))

    def options(self, geometry: CacheGeometry) -> dict[str, Any]:
        """Return further arguments of `create_cache`, in every layout."""
        learnt, offsets = self.calibration(geometry), self.key_offsets(geometry)
        return {"calibration": learnt, "key_offsets": offsets}

    def key_offsets(self, geometry: CacheGeometry) -> dict[int, KeyOffset]:
        """Return the key offsets by layer: none."""
        return {}

    def calibration(self, geometry: CacheGeometry) -> dict[int, Learnt]:
        """Return the calibration by layer: none, but for fitted methods."""
        return {}

    def learnt_bytes(self, geometry: CacheGeometry) -> int:
        """Return the bytes of the learnt states of all layers' codecs."""
        states = [state for pair in self.calibration(geometry).values() for state in pair]
        return sum(tensor.nbytes for state in states for tensor in state.values())

    def empty_bytes(self, cache: Any, geometry: CacheGeometry) -> int:
        """Return the bytes that an empty cache holds: what its codecs have learnt."""
        return self.learnt_bytes(geometry)

    def exact_tokens(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (sinks, window) for K and for V: tokens that read back exactly."""
        spec = parse_spec(self.spec)
        return (spec.key.sinks, spec.key.window), (spec.value.sinks, spec.value.window)

    def groups(self) -> tuple[int, int]:
        """Return the tokens that are quantised together, for K and for V."""
        key, value = parse_spec(self.spec).codecs(64, 64, torch.float32)
        return key.group, value.group

    def units(self) -> tuple[int, int]:
        """Return the tokens that leave the window together, for K and for V."""
        (_, k_window), (_, v_window) = self.exact_tokens()
        k, v = self.groups()
        return max(k, 32 if k_window else 1), max(v, 32 if v_window else 1)

    def streams(self, cache: Any) -> list[Stream]:
        """Return the streams of kvpact's contiguous cache; none for any other cache."""
        entry = getattr(cache, "entry", None)
        if entry is None:
            return []
        return [stream for i in range(cache.geometry.num_layers) for stream in entry(i).streams()]

    def needs(self, *operations: str) -> None:
        """Skip the running check unless the cache has these operations."""
        for name in operations:
            if name not in self.operations:
                pytest.skip(f"the cache has no {name}")

    def tokens(self, shape: Shape, count: int, seed: int = 0, queries: int = 2) -> Tokens:
        """Return k, v and q of `count` tokens; `queries` query heads per KV head."""
        rows, heads, dtype = shape.batch, shape.heads, shape.dtype
        k = random_tokens(rows, heads, count, shape.dim, seed=seed, dtype=dtype, offset=1.0)
        v = random_tokens(rows, heads, count, shape.v_dim, seed=seed + 1000, dtype=dtype)
        q = random_tokens(rows, heads * queries, count, shape.dim, seed=seed + 2000, dtype=dtype)
        return k, v, q

    def append(
        self, cache: Any, tokens: Tokens, config: AttendConfig | None = None, layer: int = 0
    ) -> None:
        """Store tokens."""
        cache.prefill(layer, *tokens, config)

    def filled(
        self,
        shape: Shape,
        pieces: Iterable[int] | None = None,
        seed: int = 0,
        config: AttendConfig | None = None,
        layers: int = 1,
        count: int | None = None,
    ) -> Any:
        """Return a cache that holds the shape's first tokens in all layers, appended in pieces."""
        cache = self.make_cache(shape.geometry(layers))
        given = self.tokens(shape, shape.tokens if count is None else count, seed)
        for part in in_pieces(given, shape.pieces if pieces is None else pieces):
            for layer in range(layers):
                self.append(cache, part, config, layer)
        return cache

    def read(self, cache: Any, shape: Shape, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return K and V of the tokens that a cache holds; the cache stays as it is."""
        probe = self.tokens(replace(shape, batch=self.rows(cache, shape)), 1, seed=99)
        held = cache.seq_len(layer)
        result = cache.fork().prefill(layer, *probe)
        assert result.total == held + 1
        return result.k[:, :, :held], result.v[:, :, :held]

    def rows(self, cache: Any, shape: Shape) -> int:
        """Return how many rows a cache holds (those of the shape unless it says otherwise)."""
        rows = getattr(cache, "batch_size", None)
        return shape.batch if rows is None else int(rows)

    def held(self, cache: Any) -> dict[str, Tensor]:
        """Return all tensors that a cache holds, by name."""
        return held_tensors(cache)

    def state(self, cache: Any) -> dict[str, Tensor]:
        """Return copies of all tensors that a cache holds."""
        return {name: tensor.detach().clone() for name, tensor in self.held(cache).items()}

    def refused(
        self, cache: Any, error: type[Exception], call: Callable[..., Any], *args: Any
    ) -> None:
        """Check that a call on a cache of two layers is a named error, and changes nothing."""
        before, lengths = self.state(cache), [cache.seq_len(layer) for layer in range(2)]
        with pytest.raises(error) as caught:
            call(*args)
        assert isinstance(caught.value, KVPactError)
        assert len(str(caught.value)) > 10, "an error says what to do"
        assert [cache.seq_len(layer) for layer in range(2)] == lengths
        self.assert_same(before, cache)

    def assert_same(self, a: Any, b: Any) -> None:
        """Check that two caches hold the same tensors, byte by byte."""
        left, right = (x if isinstance(x, dict) else self.held(x) for x in (a, b))
        different = difference(left, right)
        assert not different, f"not the same bytes: {different}"
