"""An append to a stream: what will be held, and the slots that have to be written before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpact.kernels.base import Encoder
from kvpact.kernels.sources import PlacedSegments

if TYPE_CHECKING:
    from kvpact.cache.stream import Stream


class Piece(NamedTuple):
    """Whole groups (or the rest of one), prepared by an encoder, and the tokens they are."""

    start: int
    end: int
    encoder: Encoder
    prepared: Any


class AppendPlan(NamedTuple):
    """An append that changed nothing yet: the stream as it will be, and what its slots lack."""

    after: Stream
    pieces: list[Piece]

    def write(self) -> None:
        """Write the new slots, which are zero and lie behind all that the stream holds now.

        Raises `KernelError` where the native encoder refuses; some slots may be written.
        """
        if not self.pieces:
            return
        source, size = self.after.store.source(), self.after.store.segment_tokens
        segments = PlacedSegments(source, -(-self.after.packed // size))
        for piece in self.pieces:
            piece.encoder.write(piece.prepared, segments, size, piece.start)

    def __repr__(self) -> str:
        """Tell where slots are going to be written, and what the stream will hold then."""
        spans = ", ".join(f"{piece.start}:{piece.end}" for piece in self.pieces)
        return f"AppendPlan(writes=[{spans}], after={self.after!r})"
