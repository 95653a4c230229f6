"""The state of one sequence of a paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from kvpact.cache.layer.held import Held, exchange
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.paged.pool import PagePool
from kvpact.cache.paged.sharing import SinkPair
from kvpact.geometry import CacheGeometry
from kvpact.kernels import StepRunner


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
        gone = [Held(version=layer.version + 1) for layer in self.layers]
        exchange(self.layers, gone)
        self.table.clear()

    @property
    def packed(self) -> int:
        """Tokens packed in every stream of every layer."""
        return min(packed_tokens(layer) for layer in self.layers)


class KnownRows(NamedTuple):
    """Rows that took a step of a layer together, what holds them, and their runners.

    `room`: tokens that fit every row's pages before a shared one, counted at `PagePool.changes`.
    """

    seqs: list[int]
    sequences: list[PagedSequence]
    layers: list[CacheLayer]
    runners: list[StepRunner]
    room: int = -1
    changes: int = -1

    def stand(self) -> bool:
        """Return whether no layer took another step in the meantime."""
        for layer, runner in zip(self.layers, self.runners, strict=True):
            if layer._held.runner is not runner or not layer.clean:
                return False
        return True

    def after(self, new: int) -> KnownRows:
        """Return the rows after a step of so many tokens."""
        seqs, sequences, layers, _, room, changes = self
        runners = [runner for layer in layers if (runner := layer._held.runner) is not None]
        return KnownRows(seqs, sequences, layers, runners, room - new, changes)

    def counted(self, pool: PagePool) -> KnownRows:
        """Return the rows with the room that they have now; the pool's lock is held."""
        if self.changes == pool.changes and pool.counted:
            return self
        return self._replace(room=self._room(pool), changes=pool.changes)

    def _room(self, pool: PagePool) -> int:
        """Return how many new tokens fit each row's pages, before one others hold is written."""
        size, references, room = pool.page_size, pool.references, []
        for sequence, entry in zip(self.sequences, self.layers, strict=True):
            table = sequence.table
            room.append(len(table) * size - entry.length)
            for stream in entry.streams():
                for index in range(stream.packed // size, len(table)):
                    if references[table[index]] != 1:
                        room.append(stream.room_before(index * size))
                        break
        return min(room) if pool.counted else -1


def hold_packed(
    layer: CacheLayer, tokens: int, geometry: CacheGeometry, like: Tensor, sinks: SinkPair
) -> None:
    """Let a new layer hold tokens that are packed in its stores, and their sinks."""
    streams = []
    for key, dim in ((True, geometry.head_dim), (False, geometry.value_dim)):
        x = like.new_zeros(1, geometry.num_kv_heads, 0, dim)
        empty, given = layer.new_stream(x, key), sinks[0 if key else 1]
        streams.append(
            empty.restore(tokens, tokens, empty.tail, empty.sinks if given is None else given)
        )
    layer._held = Held(streams[0], streams[1])


def packed_tokens(layer: CacheLayer) -> int:
    """Return the tokens that are packed in both streams of a layer."""
    return min((stream.packed for stream in layer.streams()), default=0)


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; forks share exact tokens until one side appends."""
    held = {x.untyped_storage().data_ptr(): x.nbytes for x in tensors if x.nbytes}
    return sum(held.values())
