"""Tokens that a caller drops, wherever they stand; those after them move up.

A stream becomes what it is after a rollback to the first token that goes, once it is given what
stays after that one, decompressed: tokens in front and exact ones stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpact.cache.layer.held import Also, Held, exchange
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.stream import PIECE, Stream
from kvpact.errors import GeometryError, SpecError, StaleResult
from kvpact.geometry import check_count
from kvpact.units import TILE, segment_tokens


class Evictable:
    """`evict` and `compact` for caches of layers that hold one batch."""

    _layers: list[CacheLayer]

    def evict(self, begin: int, end: int) -> None:
        """Forget the tokens ``begin <= t < end`` of all rows and layers; memory is free at once.

        Later tokens move up: what was token `end` is token `begin` from now on. Their keys stay as
        they are, turned by the positions they were stored with; so go on with the positions that
        would have followed. Packed tokens after the gap are decompressed and packed again, which
        costs them precision. If anything is raised, all layers are as before; until the end of the
        call what lies after `begin` is held twice.

        Parameters
        ----------
        begin, end : int
            ``0 <= begin <= end <= seq_len()``.

        Raises
        ------
        GeometryError
            Not such a range; layers hold unlike numbers of tokens; rows are padded on the left.
        SpecError
            Something that depends on positions is taken off keys before they are stored.
        """
        self.let_go(begin, end)

    def let_go(self, begin: int, end: int, also: Sequence[Also] = ()) -> None:
        """Do what `evict` does, and set attributes of others at once with it."""
        check_count("begin", begin)
        check_count("end", end)
        length = self._length()
        if not begin <= end <= length:
            raise GeometryError(f"tokens {begin} to {end} of {length} can't be dropped")
        kept = torch.arange(length - (end - begin), dtype=torch.int64, device="cpu")
        kept[begin:] += end - begin
        self._keep([kept] * len(self._layers), also)

    def compact(self, keep: Tensor) -> None:
        """Keep some tokens alone, in each layer and head as many of its own choice.

        What is said of memory, positions, precision and errors at `evict` holds here, too.

        Parameters
        ----------
        keep : Tensor
            Integers, ascending along the last axis: `[n]`, the same tokens everywhere, or
            `[layers, B, H_kv, n]`.

        Raises
        ------
        GeometryError, SpecError
            Not such a tensor, or as `evict`.
        """
        self.let_go_but(keep)

    def let_go_but(self, keep: Tensor, also: Sequence[Also] = ()) -> None:
        """Do what `compact` does, and set attributes of others at once with it."""
        length, layers = self._length(), len(self._layers)
        first = next((layer.k for layer in self._layers if layer.k is not None), None)
        shape = (0, 0) if first is None else first.memory.tensor.shape[:2]
        if (
            not isinstance(keep, Tensor)
            or keep.dtype not in (torch.int32, torch.int64)
            or (keep.dim() != 1 and keep.shape[:-1] != (layers, *shape))
        ):
            raise GeometryError(
                f"keep should be integers, [n] or [{layers}, {shape[0]}, {shape[1]}, n]"
            )
        keep = keep.to("cpu", torch.int64)
        rising = bool((keep.diff(dim=-1) > 0).all())
        if keep.numel() and (not rising or int(keep.min()) < 0 or int(keep.max()) >= length):
            raise GeometryError(f"keep should be ascending along the last axis, within {length}")
        self._keep([keep] * layers if keep.dim() == 1 else list(keep), also)

    def _length(self) -> int:
        """Return the tokens of all layers, which may drop some."""
        lengths = {layer.length for layer in self._layers}
        if len(lengths) > 1:
            raise GeometryError(
                f"layers hold {' and '.join(map(str, sorted(lengths)))} tokens: give each the same "
                "before tokens are dropped"
            )
        for layer in self._layers:
            if layer.padding is not None and bool(layer.padding.any()):
                raise GeometryError(
                    "rows that are padded on the left drop no tokens: give each row a cache"
                )
            if layer.knows_positions():
                raise SpecError(
                    "what keys have by their positions alone is taken off them here, so tokens "
                    "can't move up: make the cache without key offsets and rotations to drop "
                    "tokens"
                )
        return lengths.pop()

    def _keep(self, kept: list[Tensor], also: Sequence[Also]) -> None:
        """Let each layer hold the tokens `[n]` or `[B, H, n]`, or none where that raises."""
        made = [_kept(layer, index) for layer, index in zip(self._layers, kept, strict=True)]

        def exchanged() -> None:
            for layer, (before, _) in zip(self._layers, made, strict=True):
                if layer._held is not before:
                    raise StaleResult("the cache was written to while it dropped tokens; try again")
            exchange(self._layers, [after for _, after in made], also)

        _locked(self._layers, exchanged)


def _locked(layers: Sequence[CacheLayer], call: Callable[[], None]) -> None:
    """Call something while nobody else writes to any of the layers."""
    if not layers:
        return call()
    with layers[0].lock:
        return _locked(layers[1:], call)


def _kept(layer: CacheLayer, index: Tensor) -> tuple[Held, Held]:
    """Return what a layer holds, and that with some tokens alone."""
    with layer.lock:
        if not layer.clean:
            layer.settle()
        held = layer._held
        if held.k is None or held.v is None or index.shape[-1] == held.length:
            return held, held
        k, v, version = _kept_stream(held.k, index), _kept_stream(held.v, index), held.version + 1
        after = held._replace(k=k, v=v, padding=None, version=version, seen=None, runner=None)
        return held, layer.paced(after)


def _kept_stream(stream: Stream, index: Tensor) -> Stream:
    count = index.shape[-1]
    places = torch.arange(count, dtype=torch.int64, device="cpu")
    same = (index == places).view(math.prod(index.shape[:-1]), count).all(0)
    first = int(same.cumprod(0).sum())  # nothing goes in front of it
    kept = stream.shared().truncate(first, None)
    for start in range(first, count, PIECE):
        part = index[..., start : start + PIECE]
        low = int(part.min())
        x = stream.decoded(low, int(part.max()) + 1, None)
        part = (part - low).to(x.device)
        if part.dim() == 1:
            x = x.index_select(2, part)
        else:
            x = x.gather(2, part[..., None].expand(-1, -1, -1, x.shape[3]))
        kept = kept.prepare(x, None, None).write()
    return kept


def keep_last(layer: CacheLayer, kept: int) -> None:
    """Forget tokens in front of the last `kept`, as far as they fill whole segments."""
    with layer.lock:
        held, streams = layer._held, layer.streams()
        first = min([held.length - kept, *(stream.tail_start for stream in streams)])
        if first < TILE or not streams:
            return
        device = streams[0].memory.tensor.device.type
        least = math.lcm(TILE, *(stream.codec.group for stream in streams))
        sizes = []
        for x in streams:
            size = segment_tokens(x.codec.group, x.packed - first + least, device)
            sizes.append(min(x.store.segment_tokens, size))
        if not (first := first // math.lcm(*sizes) * math.lcm(*sizes)):
            return
        if not layer.clean:
            layer.settle()
        k, v = (
            stream.without_first(first, size) for stream, size in zip(streams, sizes, strict=True)
        )
        padding = None if held.padding is None else (held.padding - first).clamp(min=0)
        if padding is not None and not padding.any():
            padding = None
        # Views of what was held keep what they read.
        begin = held.begin + first
        layer._held = held._replace(k=k, v=v, padding=padding, runner=None, begin=begin)
