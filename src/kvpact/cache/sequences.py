"""What a paged cache knows of one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from kvpact.cache.held import Held, exchange
from kvpact.cache.layer import CacheLayer


class Page(NamedTuple):
    """One page of a sequence: its number in the pool and the tokens that stand on it."""

    page: int
    start: int
    end: int


class PagedSequence:
    """A sequence: its block table and its layers, each a cache of one row."""

    def __init__(self, table: list[int], layers: list[CacheLayer]) -> None:
        self.table, self.layers = table, layers
        # Layer -> the length that a step under way will bring it to: its pages are spoken for.
        self.coming: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Tokens of the longest layer."""
        return max(layer.length for layer in self.layers)

    def end(self) -> None:
        """Hold nothing any more; views of what was held are refused."""
        gone = [Held(None, None, None, layer.version + 1) for layer in self.layers]
        exchange(self.layers, gone)
        self.table.clear()

    def __repr__(self) -> str:
        """Tell which pages there are, and what the layers hold."""
        lengths = [layer.length for layer in self.layers]
        packed = [packed_tokens(layer) for layer in self.layers]
        dirty = [index for index, layer in enumerate(self.layers) if not layer.clean]
        return (
            f"PagedSequence(pages={self.table}, lengths={lengths}, packed={packed}, "
            f"coming={self.coming}, dirty={dirty})"
        )

    @property
    def packed(self) -> int:
        """Tokens packed in every stream of every layer."""
        return min(packed_tokens(layer) for layer in self.layers)


def packed_tokens(layer: CacheLayer) -> int:
    """Return the tokens that are packed in both streams of a layer."""
    return min((stream.packed for stream in layer.streams()), default=0)


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; forks share exact tokens until one side appends."""
    held = {x.untyped_storage().data_ptr(): x.nbytes for x in tensors if x.nbytes}
    return sum(held.values())
