"""What the attention sees of one layer: packed slots read in tiles, and exact tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.kernels.cpu.decode import decoded
from kvpact.kernels.cpu.slots import SegmentSource
from kvpact.kernels.plan import Kernel
from kvpact.methods import Codec

CHUNK = 256
"""Tokens that are decoded at a time."""


Decoder = Callable[[dict[str, Tensor]], Tensor]


class StreamView(NamedTuple):
    """K or V of one layer at one moment.

    Parameters
    ----------
    codec : Codec
        Decodes the slots.
    source : SegmentSource
        The slots.
    exact_from : int
        Tokens from here on are in `tail`; those before are packed.
    tail : Tensor
        `[B, H, length - exact_from, D]`, the exact recent tokens.
    sinks : Tensor or None
        `[B, H, S, D]`, exact copies of each row's first tokens.
    sink_positions : Tensor or None
        `[B, S]`, where they stand.
    sink_end : int
        No sink token stands at or behind this position.
    check : callable
        Raises `StaleResult` if the view's slots are no longer there.
    kernel : Kernel, optional
        What decodes; torch if omitted.
    """

    codec: Codec
    source: SegmentSource
    exact_from: int
    tail: Tensor
    sinks: Tensor | None
    sink_positions: Tensor | None
    sink_end: int
    check: Callable[[], None]
    kernel: Kernel | None = None

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.exact_from + self.tail.shape[2]

    def read(self, start: int, end: int, decode: Decoder | None = None) -> Tensor:
        """Decode packed tokens, still transformed, the sink tokens put in their places.

        Parameters
        ----------
        start, end : int
            Tokens, `0 <= start < end <= exact_from`.
        decode : callable, optional
            `codec.decode` if omitted. With another one, sink tokens are zero.

        Returns
        -------
        Tensor
            `[B, H, end - start, D]` fp32.
        """
        if decode is None:
            y = self._decoded(start, end, torch.float32, False)
            if y is not None:
                return self._place_sinks(y, start, self.codec.transform.forward)
        return self._read(start, end, decode)

    def _read(self, start: int, end: int, decode: Decoder | None = None) -> Tensor:
        size = self.source.segment_tokens
        first, last = start // size, -(-end // size)
        arrays = {}
        for field in self.codec.fields:
            arrays[field.name] = field.read(self.source.gather(field.name, first, last))
        offset = first * size
        y = (decode or self.codec.decode)(arrays)[:, :, start - offset : end - offset]
        make = self.codec.transform.forward if decode is None else torch.zeros_like
        return self._place_sinks(y, start, make, copy=True)

    def _decoded(
        self, start: int, end: int, dtype: torch.dtype, inverse: bool, out: Tensor | None = None
    ) -> Tensor | None:
        if out is None:
            batch, heads, _, dim = self.tail.shape
            out = self.tail.new_empty(batch, heads, end - start, dim, dtype=dtype)
        packed = self.exact_from
        done = decoded(self.kernel, self.codec, self.source, packed, start, end, out, inverse)
        return out if done else None

    def read_exact(self, start: int, end: int) -> Tensor:
        """Return tokens of the tail, `[B, H, end - start, D]`.

        Contiguous: a product's last bits depend on strides, and the tail's tell of its history.
        """
        return self.tail[:, :, start - self.exact_from : end - self.exact_from].contiguous()

    def dequantize(
        self, start: int, end: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Return packed tokens in the original space, sink tokens as they were given.

        `out`, of that dtype and `[B, H, end - start, D]`, is where they then are.
        """
        x = self._decoded(start, end, dtype, True, out)
        native = x is not None
        if x is None:
            x = saturated(self.codec.transform.inverse(self._read(start, end)), dtype)
            x = x if out is None else out.copy_(x)
        copy = not native and out is None
        return self._place_sinks(x, start, lambda sinks: sinks, copy)

    def dequantize_without_bias(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return packed tokens less the part that `bias` covers."""
        codec = self.codec
        y = self._read(start, end, lambda arrays: codec.decode(arrays) - codec.decode_bias(arrays))
        x = saturated(codec.transform.inverse(y), dtype)
        return self._place_sinks(x, start, lambda sinks: sinks, copy=True)

    def _place_sinks(
        self, y: Tensor, start: int, make: Callable[[Tensor], Tensor], copy: bool = False
    ) -> Tensor:
        if self.sinks is None or self.sink_positions is None or start >= self.sink_end:
            return y
        inside = (self.sink_positions >= start) & (self.sink_positions < start + y.shape[2])
        row, slot = inside.nonzero(as_tuple=True)
        y = y.clone() if copy else y
        y[row, :, self.sink_positions[row, slot] - start] = make(self.sinks[row, :, slot]).to(y)
        return y


class LayerView(NamedTuple):
    """K and V of one layer at one moment, and each row's padding.

    Parameters
    ----------
    k, v : StreamView
        The streams; both hold `length` tokens.
    padding : Tensor or None
        `[B]` left-padding tokens.
    kernel : Kernel, optional
        What computes; torch if omitted.
    """

    k: StreamView
    v: StreamView
    padding: Tensor | None
    kernel: Kernel | None = None

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.k.length

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Iterate over token ranges in each of which K is all packed or all exact, and so is V."""
        size = self.k.source.segment_tokens
        step = max(CHUNK // size, 1) * size
        cuts = sorted({0, self.k.exact_from, self.v.exact_from, self.length})
        for low, high in pairwise(cuts):
            start = low
            while start < high:
                end = min((start // step + 1) * step, high)
                yield start, end
                start = end
