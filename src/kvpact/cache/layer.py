"""One layer of a cache: its two streams, its padding and its lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from kvpact.attention import LayerView, StreamView
from kvpact.cache.step import Step
from kvpact.cache.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, StaleResult
from kvpact.spec import Spec


class CacheLayer:
    """K and V of one layer. Every public method takes the layer's lock.

    Parameters
    ----------
    spec : Spec
        Methods for K and V.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        self.k: Stream | None = None
        self.v: Stream | None = None
        self._padding: Tensor | None = None
        self._version = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        with self.lock:
            return 0 if self.k is None else self.k.length

    @property
    def padding_bytes(self) -> int:
        """Bytes that the rows' padding takes."""
        return 0 if self._padding is None else self._padding.nbytes

    def attend(self, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the tokens held and the new ones, and store these; all or nothing."""
        with self.lock:
            if not config.exact_new:
                trial = self.fork()
                trial.lock = self.lock  # nobody else knows it: one lock will do
                output = trial.store(k, v, config).attend(q, config)
                self.k, self.v, self._padding = trial.k, trial.v, trial._padding
                return output
            padding = self._next_padding(config, k.shape[0])
            output = Step(self._view(padding), k, v, padding).attend(q, config)
            self._append(k, v, padding)
            return output

    def store(self, k: Tensor, v: Tensor, config: AttendConfig) -> Step:
        """Store new tokens and return them beside a view of the past."""
        with self.lock:
            padding = self._next_padding(config, k.shape[0])
            view = self._view(padding)
            self._append(k, v, padding)
            if config.exact_new:
                return Step(view, k, v, padding)
            return Step(self._view(padding), k[:, :, :0], v[:, :, :0], padding)

    def _next_padding(self, config: AttendConfig, batch: int) -> Tensor | None:
        """Return the padding with what `config` says of rows that hold no real token yet."""
        if config.padding is None:
            return self._padding
        given = config.padding.to("cpu", torch.long)
        known = self._padding if self._padding is not None else torch.zeros(batch, dtype=torch.long)
        open_rows = known >= self.length
        merged = torch.where(open_rows, torch.maximum(given, known), known)
        return merged if merged.any() else None

    def _sink_positions(self, stream: Stream, padding: Tensor | None) -> Tensor | None:
        if stream.sinks is None:
            return None
        batch, _, sinks, _ = stream.sinks.shape
        first = torch.zeros(batch, dtype=torch.long) if padding is None else padding
        return (first.unsqueeze(1) + torch.arange(sinks)).to(stream.sinks.device)

    def _append(self, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
        streams = (self.k or self._new_stream(k, True), self.v or self._new_stream(v, False))
        plans = [
            stream.prepare(x, self._sink_positions(stream, padding))
            for stream, x in zip(streams, (k, v), strict=True)
        ]
        # Nothing below can fail half way: the plans hold all that needed memory or checks.
        for stream, plan in zip(streams, plans, strict=True):
            stream.commit(plan)
        self.k, self.v = streams
        self._padding = padding

    def _new_stream(self, x: Tensor, key: bool) -> Stream:
        batch, heads, _, dim = x.shape
        method = self.spec.key if key else self.spec.value
        codec = (method.key_codec if key else method.value_codec)(dim, x.dtype)
        return Stream(codec, batch, heads, dim, method.sinks, method.window, x.dtype, x.device)

    def _view(self, padding: Tensor | None) -> LayerView | None:
        if self.k is None or self.v is None or self.length == 0:
            return None
        version = self._version

        def check() -> None:
            if self._version != version:
                raise StaleResult(
                    "the cache was rolled back, reordered or reset since this result was made; "
                    "read k and v before that"
                )

        k, v = (self._stream_view(stream, padding, check) for stream in (self.k, self.v))
        return LayerView(k, v, padding)

    def _stream_view(
        self, stream: Stream, padding: Tensor | None, check: Callable[[], None]
    ) -> StreamView:
        positions = self._sink_positions(stream, padding)
        return StreamView(
            codec=stream.codec,
            segments=tuple(stream.segments),
            segment_tokens=stream.segment_tokens,
            exact_from=stream.length - stream.tail.shape[2],
            tail=stream.tail,
            sinks=stream.sinks,
            sink_positions=positions,
            sink_end=0 if positions is None else int(positions.max()) + 1,
            check=check,
        )

    def dequantize(self, side: str) -> Tensor:
        """Return K or V of all tokens held, decompressed."""
        with self.lock:
            stream = self.k if side == "k" else self.v
            if stream is None:
                raise GeometryError("the layer holds no tokens yet")
            view = self._stream_view(stream, self._padding, lambda: None)
            packed = (
                [view.dequantize(0, view.exact_from, view.tail.dtype)] if view.exact_from else []
            )
            return torch.cat([*packed, view.tail], dim=2)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; nothing if there are no more than that."""
        with self.lock:
            if self.k is None or self.v is None or length >= self.length:
                return
            self._version += 1
            for stream in (self.k, self.v):
                stream.truncate(length)
                positions = self._sink_positions(stream, self._padding)
                if positions is not None:
                    stream.clear_sinks(positions, length)
            if length == 0:
                self._padding = None

    def fork(self) -> CacheLayer:
        """Return a copy that shares the slots until one side writes."""
        with self.lock:
            other = CacheLayer(self.spec)
            if self.k is not None and self.v is not None:
                other.k, other.v, other._padding = self.k.fork(), self.v.fork(), self._padding
            return other

    def select(self, indices: Tensor) -> None:
        """Keep the given batch rows, in this order; rows may repeat."""
        with self.lock:
            if self.k is None or self.v is None:
                return
            self._version += 1
            self.k, self.v = self.k.select(indices), self.v.select(indices)
            if self._padding is not None:
                self._padding = self._padding[indices.cpu()]

    def reset(self) -> None:
        """Forget everything, the batch size included."""
        with self.lock:
            self._version += 1
            self.k = self.v = self._padding = None

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        with self.lock:
            streams = [stream for stream in (self.k, self.v) if stream is not None]
            held = [tensor for stream in streams for tensor in stream.tensors()]
            return held + ([] if self._padding is None else [self._padding])
