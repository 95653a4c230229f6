"""One layer of a cache: its two streams, its padding and its lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.segments import SegmentList, SegmentStore
from kvpact.cache.step import Step
from kvpact.cache.stream import AppendPlan, Stream
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, StaleResult
from kvpact.geometry import CacheGeometry
from kvpact.kernels import Compute, LayerView, Plan, StreamView, check_queries
from kvpact.methods import Codec
from kvpact.spec import Spec

MakeStore = Callable[[Codec, int, int, torch.device, str], SegmentStore]


def _segment_list(
    codec: Codec, batch: int, heads: int, device: torch.device, side: str
) -> SegmentStore:
    return SegmentList(codec, batch, heads, device)


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).expand(batch, -1).contiguous()


def _forked(stream: Stream, side: str, make_store: MakeStore | None) -> Stream:
    if make_store is None:
        return stream.fork()
    batch, heads = stream.tail.shape[:2]
    return stream.fork(make_store(stream.codec, batch, heads, stream.tail.device, side))


class LayerPlan(NamedTuple):
    """New tokens of a layer, encoded and not yet stored."""

    streams: tuple[Stream, Stream]
    appends: list[AppendPlan]
    step: Step
    exact_new: bool


class CacheLayer:
    """K and V of one layer. Every public method takes the layer's lock.

    Parameters
    ----------
    spec : Spec
        Methods for K and V.
    make_store : callable
        Makes the storage of a stream: ``(codec, batch, heads, device, side)``, side ``k`` or ``v``.
    codecs : tuple of Codec, optional
        The codecs for K and V; made from the spec when the first tokens come if omitted.
    latent : bool
        K and V are MLA latents and rotated keys.
    compute : Compute, optional
        What was asked to compute; the best that is there if omitted.
    """

    def __init__(
        self,
        spec: Spec,
        make_store: MakeStore = _segment_list,
        codecs: tuple[Codec, Codec] | None = None,
        latent: bool = False,
        compute: Compute | None = None,
    ) -> None:
        self.spec, self._make_store, self._codecs = spec, make_store, codecs
        self.lock, self._latent = threading.RLock(), latent
        self.compute = compute or Compute()
        self.k: Stream | None = None
        self.v: Stream | None = None
        self._padding: Tensor | None = None
        self._version = 0
        self._plan: Plan | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        with self.lock:
            return 0 if self.k is None else self.k.length

    @property
    def padding(self) -> Tensor | None:
        """Left-padding tokens of each row, `[B]`."""
        return self._padding

    @property
    def codecs(self) -> tuple[Codec, Codec] | None:
        """The codecs for K and V, where they were given and not made for the first tokens."""
        return self._codecs

    @property
    def padding_bytes(self) -> int:
        """Bytes that the rows' padding takes."""
        return 0 if self._padding is None else self._padding.nbytes

    def attend(self, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the tokens held and the new ones, and store these; all or nothing."""
        with self.lock:
            plan = self.prepare(k, v, config)
            if config.exact_new:
                output = plan.step.attend(q, config)
                self.commit(plan)
                return output
            check_queries(q, k.shape[1], self.length + k.shape[2], config)
            return self.commit(plan).attend(q, config)

    def store(self, k: Tensor, v: Tensor, config: AttendConfig) -> Step:
        """Store new tokens and return them beside a view of the past."""
        with self.lock:
            return self.commit(self.prepare(k, v, config))

    def prepare(self, k: Tensor, v: Tensor, config: AttendConfig) -> LayerPlan:
        """Encode new tokens and allocate what they need; the layer stays as it is."""
        padding = self._next_padding(config, k.shape[0])
        streams = (self.k or self.new_stream(k, True), self.v or self.new_stream(v, False))
        appends = [
            stream.prepare(x, *self._sink_positions(stream, padding))
            for stream, x in zip(streams, (k, v), strict=True)
        ]
        computes = self._plan_of(*streams)
        step = Step(self._view(padding), k, v, padding, self.lock, computes, self._latent)
        return LayerPlan(streams, appends, step, config.exact_new)

    def commit(self, plan: LayerPlan) -> Step:
        """Carry out a plan; nothing in it can fail: what needs memory or checks was prepared."""
        for stream, append in zip(plan.streams, plan.appends, strict=True):
            stream.commit(append)
        self.k, self.v = plan.streams
        self._padding = plan.step.padding
        if plan.exact_new:
            return plan.step
        k, v = plan.step.k[:, :, :0], plan.step.v[:, :, :0]
        return plan.step._replace(view=self._view(self._padding), k=k, v=v)

    def _plan_of(self, k: Stream, v: Stream) -> Plan:
        """Return who computes for the layer, decided once for its codecs."""
        plan = self._plan
        if plan is None or plan.k.codec is not k.codec or plan.v.codec is not v.codec:
            plan = self._plan = self.compute.plan(k.plan, v.plan)
        return plan

    def adopt(
        self,
        tokens: int,
        geometry: CacheGeometry,
        dtype: torch.dtype,
        device: torch.device,
        sinks: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Take over `tokens` tokens that are packed in the store already, with their sinks."""
        with self.lock:
            shape = (1, geometry.num_kv_heads, 0)
            k = torch.zeros(*shape, geometry.head_dim, dtype=dtype, device=device)
            v = torch.zeros(*shape, geometry.value_dim, dtype=dtype, device=device)
            self.k, self.v = self.new_stream(k, True), self.new_stream(v, False)
            self.k.adopt(tokens, sinks[0])
            self.v.adopt(tokens, sinks[1])

    def _next_padding(self, config: AttendConfig, batch: int) -> Tensor | None:
        """Return the padding with what `config` says of rows that hold no real token yet."""
        if config.padding is None:
            return self._padding
        given = config.padding.to("cpu", torch.long)
        known = self._padding if self._padding is not None else torch.zeros(batch, dtype=torch.long)
        open_rows = known >= self.length
        merged = torch.where(open_rows, torch.maximum(given, known), known)
        return merged if merged.any() else None

    def _sink_positions(self, stream: Stream, padding: Tensor | None) -> tuple[Tensor | None, int]:
        """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last."""
        if stream.sinks is None:
            return None, 0
        batch, _, sinks, _ = stream.sinks.shape
        if padding is None:
            return _first_tokens(batch, sinks, stream.sinks.device), sinks
        positions = padding.unsqueeze(1) + torch.arange(sinks)
        return positions.to(stream.sinks.device), int(padding.max()) + sinks

    def make_codec(self, x: Tensor, key: bool) -> Codec:
        """Return the codec for K or V like `x` (`[B, H, T, D]`), fitted if it is shared."""
        if self._codecs is not None:
            return self._codecs[0 if key else 1]
        method = self.spec.key if key else self.spec.value
        codec: Codec = (method.key_codec if key else method.value_codec)(x.shape[3], x.dtype)
        return codec

    def new_stream(self, x: Tensor, key: bool, codec: Codec | None = None) -> Stream:
        """Return an empty stream for K or V like `x`, not yet the layer's own."""
        batch, heads, _, dim = x.shape
        method = self.spec.key if key else self.spec.value
        codec = codec or self.make_codec(x, key)
        store = self._make_store(codec, batch, heads, x.device, "k" if key else "v")
        return Stream(
            codec,
            batch,
            heads,
            dim,
            method.sinks,
            method.window,
            x.dtype,
            x.device,
            store,
            self.compute.stream(codec, x.device, x.dtype),
        )

    def take_over(self, k: Stream | None, v: Stream | None, padding: Tensor | None) -> None:
        """Hold other streams from now on."""
        with self.lock:
            self._version += 1
            self.k, self.v, self._padding = k, v, padding

    def emptied(self) -> CacheLayer:
        """Return a layer like this one that holds nothing."""
        return CacheLayer(self.spec, self._make_store, self._codecs, self._latent, self.compute)

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
        positions, sink_end = self._sink_positions(stream, padding)
        return StreamView(
            codec=stream.codec,
            source=stream.store.source(),
            exact_from=stream.exact_from,
            tail=stream.exact_tail(),
            sinks=stream.sinks,
            sink_positions=positions,
            sink_end=sink_end,
            check=check,
        )

    def dequantize(self, side: str) -> Tensor:
        """Return K or V of all tokens held, decompressed."""
        with self.lock:
            stream = self.k if side == "k" else self.v
            if stream is None:
                raise GeometryError("the layer holds no tokens yet")
            view = self._stream_view(stream, self._padding, lambda: None)
            batch, heads, _, dim = view.tail.shape
            whole, begin = view.tail.new_empty(batch, heads, view.length, dim), view.exact_from
            if begin:
                stream.plan.decode(view, 0, begin, whole[:, :, :begin])
            whole[:, :, begin:] = view.tail
            return whole

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; nothing if there are no more than that."""
        with self.lock:
            if self.k is None or self.v is None or length >= self.length:
                return
            self._version += 1
            for stream in (self.k, self.v):
                stream.truncate(length)
                positions, _ = self._sink_positions(stream, self._padding)
                if positions is not None:
                    stream.clear_sinks(positions, length)
            if length == 0:
                self._padding = None

    def fork(self, make_store: MakeStore | None = None) -> CacheLayer:
        """Return a copy that shares the slots until one side writes.

        With `make_store` the copy's slots lie in stores of that making, which hold them already.
        """
        with self.lock:
            other = CacheLayer(
                self.spec,
                make_store or self._make_store,
                self._codecs,
                self._latent,
                self.compute,
            )
            if self.k is not None and self.v is not None:
                other.k = _forked(self.k, "k", make_store)
                other.v = _forked(self.v, "v", make_store)
                other._padding = self._padding
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

    def streams(self) -> list[Stream]:
        """Return the streams, if there are any."""
        return [stream for stream in (self.k, self.v) if stream is not None]

    def reset(self) -> None:
        """Forget everything, the batch size included."""
        with self.lock:
            self._version += 1
            self.k = self.v = self._padding = None

    def waiting_state(self) -> list[Tensor]:
        """Return what the layer's own codecs learnt, where no stream holds it."""
        held = [stream.codec for stream in self.streams()]
        codecs = [own for own in self._codecs or () if all(own is not codec for codec in held)]
        return [tensor for codec in codecs for tensor in codec.state().values()]

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        with self.lock:
            held = [tensor for stream in self.streams() for tensor in stream.tensors()]
            held += self.waiting_state()
            return held + ([] if self._padding is None else [self._padding])
