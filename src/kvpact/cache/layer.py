"""One layer of a cache: its two streams, its padding and its lock."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from math import inf, lcm
from typing import Any

from torch import Tensor

from kvpact.cache.codecs import codec_of
from kvpact.cache.held import Held, LayerPlan, Sizes, next_padding, next_seen, placed
from kvpact.cache.prompt import Prompt, alike_key
from kvpact.cache.rungs import PIECE, Rungs, climbed, in_pieces, to_learn
from kvpact.cache.segments import MakeStore, SegmentList
from kvpact.cache.step import Step
from kvpact.cache.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.errors import CorruptState, GeometryError, NonFiniteError, StaleResult
from kvpact.kernels import Compute, LayerView, largest
from kvpact.kernels.offset import known_by_position
from kvpact.key_offset import KeyOffset
from kvpact.methods import Codec
from kvpact.methods.scaled import LEAST, ScaledCodec, scaled_for, size_of
from kvpact.quantizers.checks import collected
from kvpact.spec import Spec
from kvpact.units import TILE


class CacheLayer:
    """K and V of one layer.

    What is held is one immutable value, exchanged by one assignment. So an exception, whatever it
    is and wherever it comes from, leaves the layer as it was before the call or as it is after it.
    Slots that an append was about to fill lie behind all that the value speaks of; the next
    operation clears them. Who calls the parts of an append, `truncated` or `settle` holds the lock.

    - `make_store`: makes the storage of a stream (see `MakeStore`).
    - `codecs`: for K and V; made from the spec when the first tokens come if omitted.
    - `latent`: K and V are MLA latents and rotated keys.
    - `lock`: the layer's, where several sequences have a layer each; one of its own if omitted.
    - `offset`: what is taken off keys before they are encoded; nothing is if the codec is exact.
    - `planned`: specs that the layer's first tokens begin with, see `Held.rungs`.
    """

    planned: Rungs = ()
    small: tuple[float, float] = (0.0, 0.0)
    """The largest magnitudes of the first tokens of K and of V, where they are small."""

    def __init__(
        self,
        spec: Spec,
        make_store: MakeStore = SegmentList.new,
        codecs: tuple[Codec, Codec] | None = None,
        latent: bool = False,
        compute: Compute | None = None,
        lock: AbstractContextManager[Any] | None = None,
        offset: KeyOffset | None = None,
    ) -> None:
        self._spec, self._make_store, self.codecs = spec, make_store, codecs
        self.lock, self._latent = lock or threading.RLock(), latent
        self.compute, self.offset = compute or Compute(), offset
        self._held = Held(None, None, None, 0)
        # Whether slots of tokens that are not held are zero; False before any is written.
        self.clean = True
        self._moved = 0  # how often slots came to lie elsewhere; changed under a pool's lock

    @property
    def spec(self) -> Spec:
        """The spec by which tokens are stored now."""
        return self._held.rungs[0][1] if self._held.rungs else self._spec

    @property
    def until(self) -> float:
        """Tokens up to which steps may be taken that only store them."""
        held, end = self._held, self.next_rung
        if held.ahead is not None:
            first, last = held.ahead.learning  # queries are to be seen
            end = min(end, first) if held.length < last else end
        return end

    @property
    def next_rung(self) -> float:
        """Tokens behind which the layer takes another spec."""
        rungs = self._held.rungs
        return rungs[1][0] if len(rungs) > 1 else inf

    @property
    def k(self) -> Stream | None:
        """The stream of K; None while nothing is held."""
        return self._held.k

    @property
    def v(self) -> Stream | None:
        """The stream of V; None while nothing is held."""
        return self._held.v

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._held.length

    @property
    def padding(self) -> Tensor | None:
        """Left-padding tokens of each row, `[B]`."""
        return self._held.padding

    @property
    def version(self) -> int:
        """Another number whenever views of what was held may not be read any more."""
        return self._held.version + self._moved

    def __repr__(self) -> str:
        """Tell what is held."""
        held = self._held
        padding = "" if held.padding is None else f", padding={held.padding.tolist()}"
        state = f"length={self.length}{padding}, version={held.version}, clean={self.clean}"
        return f"CacheLayer({str(self.spec)!r}, {state}, k={held.k!r}, v={held.v!r})"

    def store(
        self,
        k: Tensor,
        v: Tensor,
        config: AttendConfig,
        q: Tensor | None = None,
        sizes: Sizes = None,
    ) -> Step:
        """Store new tokens and return them beside a view of the past."""
        with self.lock:
            return self.commit(self.prepare(k, v, config, q, sizes))

    def prepare(
        self,
        k: Tensor,
        v: Tensor,
        config: AttendConfig,
        q: Tensor | None = None,
        sizes: Sizes = None,
    ) -> LayerPlan:
        """Encode new tokens and allocate what they need; the layer stays as it is."""
        if not self.clean:
            self.settle()
        held = self._held
        padding = next_padding(held, config, k.shape[0])
        rungs = held.rungs or self.planned
        spec = rungs[0][1] if rungs else self._spec
        if held.k is None:
            self.small = self._small(k, v, sizes)
        k_stream = held.k or self.new_stream(k, True, spec=spec)
        v_stream = held.v or self.new_stream(v, False, spec=spec)
        if k_stream.offset is not None:
            k_stream = placed(k_stream, held, config, padding)
        alike, known, first = None, self.compute.prompts, held.k is None and padding is None
        if (
            first
            and not (rungs or any(self.small))
            and sizes
            and self._make_store == SegmentList.new
        ):
            alike = alike_key((k_stream, v_stream), k, v, q)
            ready = (prompt := known.get(alike)) and prompt.take((k, v, q), sizes)
            if ready:
                self.compute.alike = True
                after = Held(ready.k, ready.v, None, held.version, ready.plan, begin=held.begin)
                step = Step(None, k, v, None, self.lock, ready.plan, self._latent)
                return LayerPlan(held, after, [], step, config.exact_new)
        given, ahead, total = (k, v), held.ahead, held.length + k.shape[2]
        if rungs:
            ahead = ahead or to_learn(rungs[1:], k_stream, self.new_stream)
            ahead = None if ahead is None else placed(ahead, held, config, padding)
        seen = next_seen(held, ahead or k_stream, k, q)
        if len(rungs) > 1 and total > rungs[1][0]:
            self.clean, sizes = False, None
            last = len([length for length, _ in rungs[1:] if length < total])
            also, pair = (padding, seen, ahead), (k_stream, v_stream)
            pair, given = climbed(rungs[: last + 1], pair, given, also, self.new_stream)
            (k_stream, v_stream), rungs = pair, rungs[last:]
            ahead = None if k_stream.codec.learns_from else ahead
        if rungs and k_stream.length and given[0].shape[2] > PIECE:
            self.clean, sizes = False, None
            k_stream, k_left = in_pieces(k_stream, given[0], padding, seen)
            v_stream, v_left = in_pieces(v_stream, given[1], padding, None)
            given = k_left, v_left
        k_size, v_size = (None, None) if sizes is None else sizes[:2]
        k_plan = k_stream.prepare(given[0], padding, seen, k_size)
        v_plan = v_stream.prepare(given[1], padding, None, v_size)
        plan, plans = held.plan, (k_plan.after.plan, v_plan.after.plan)
        if plan is None or (plan.k, plan.v) != plans:
            offset = k_plan.after.offset is not None
            plan = self.compute.plan(*plans, offset, self._latent)
        good = held.good
        if self.compute.deferred:
            new = collected()
            good = new if good is None or new is None else good & new
        seen = None if seen is None or (ahead or k_plan.after).codec.ready else seen
        k_after, v_after, more = k_plan.after, v_plan.after, (held.begin, rungs, ahead)
        after = Held(k_after, v_after, padding, held.version, plan, good, seen, None, *more)
        if alike is not None and alike not in known:
            empty = self.compute.plan(k_stream.plan, v_stream.plan, False, self._latent)
            pairs, layers = ((k_stream, v_stream), (k_after, v_after)), self.compute.layers
            count = layers.get(str(self._spec), 1) - 1
            known[alike] = Prompt.like(*pairs, empty, (k, v, q), count)
        self.compute.alike = False
        past = self._view(held, padding)
        step = Step(past, k, v, padding, self.lock, plan, self._latent)
        return LayerPlan(held, after, [k_plan, v_plan], step, config.exact_new)

    def _small(self, k: Tensor, v: Tensor, sizes: Sizes) -> tuple[float, float]:
        """Return `small` of first tokens. Raises `NonFiniteError` where pages can't hold them."""
        if sizes is None and not (self.compute.deferred or k.is_meta):
            sizes = largest(k, v)
        if not sizes or min(sizes[:2]) >= LEAST:
            return 0.0, 0.0
        small = sizes[0], sizes[1]
        if self._make_store != SegmentList.new and self.codecs:
            for name, codec, size in zip("kv", self.codecs, small, strict=True):
                if scaled_for(codec, size) is not codec:
                    raise NonFiniteError(
                        f"{name} has no number above {size:.3g}, too small for pages, whose "
                        "sequences share a codec; scale it up, take a contiguous cache, or keep "
                        "this layer at 'none'"
                    )
        return small

    def commit(self, plan: LayerPlan) -> Step:
        """Carry out a plan, or raise `KernelError`; the lock was held since `prepare`."""
        self.write(plan)
        self._held = plan.after
        return self.stored(plan)

    def write(self, plan: LayerPlan) -> None:
        """Write a plan's slots, which nobody reads before the layer holds `plan.after`."""
        if self._held is not plan.before:
            raise StaleResult(
                "the layer was rolled back, freed or written to while these tokens were on their "
                "way; none of them is stored, give them again"
            )
        self.clean = False
        for append in plan.appends:
            append.write()

    def stored(self, plan: LayerPlan) -> Step:
        """Return the step of a plan that was carried out."""
        self.clean = True
        if plan.exact_new:
            return plan.step
        k, v = plan.step.k[:, :, :0], plan.step.v[:, :, :0]
        return plan.step._replace(view=self._view(self._held, plan.step.padding), k=k, v=v)

    def settle(self) -> None:
        """Zero the slots of tokens that are not held; shared ones wait until they are copied."""
        streams = self._held.streams()
        self.clean = all([stream.store.clear_from(stream.packed) for stream in streams])

    def restore(
        self,
        k: Stream | None,
        v: Stream | None,
        padding: Tensor | None,
        seen: Tensor | None = None,
        begin: int = 0,
        rungs: Rungs = (),
        ahead: Stream | None = None,
    ) -> None:
        """Hold other streams from now on, whose slots are clean, and what else is in `Held`."""
        with self.lock:
            known = None, None, seen, None, begin, rungs, ahead
            self._held = Held(k, v, padding, self._held.version + 1, *known)
            self.small = (size_of(k.codec), size_of(v.codec)) if k and v else (0.0, 0.0)
            self.clean = True

    def new_stream(
        self, x: Tensor, key: bool, codec: Codec | None = None, spec: Spec | None = None
    ) -> Stream:
        """Return an empty stream for K or V like `x`, by the layer's spec, not yet its own."""
        spec = spec or self.spec
        method, (batch, heads, _, dim) = spec.key if key else spec.value, x.shape
        if codec is None and self.codecs is not None:
            codec = self.codecs[0 if key else 1]
        codec, known = codec or codec_of(method, key, dim, x.dtype), self.compute.empty
        if any(self.small) and not isinstance(codec, ScaledCodec):
            codec = scaled_for(codec, self.small[0 if key else 1])
        # Layers begin alike, and a stream never changes.
        alike = codec, method, self._make_store, batch, heads, dim, x.dtype, x.device
        stream = known.get(alike)
        if stream is None:
            store = self._make_store(codec, batch, heads, x.device, "k" if key else "v")
            plan = self.compute.stream(codec, x.device, x.dtype)
            stream = Stream.empty(codec, x, method.sinks, method.window, store, plan)
            if self._make_store == SegmentList.new and not codec.state():
                known[alike] = stream
        if self.offset is None and codec.rotation is None:
            return stream
        return stream._replace(offset=known_by_position(codec, key, self.offset))

    def empty(self) -> CacheLayer:
        """Return a layer like this one that holds nothing."""
        kept = self._spec, self._make_store, self.codecs, self._latent, self.compute
        other = CacheLayer(*kept, offset=self.offset)
        other.planned = self.planned
        return other

    def _view(self, held: Held, padding: Tensor | None) -> LayerView | None:
        if held.k is None or held.v is None:
            return None
        length = held.k.length
        if length != held.v.length:
            raise CorruptState(
                f"the layer holds {length} tokens of K and {held.v.length} of V: reset it"
            )
        if not length:
            return None
        version = held.version + self._moved

        def check() -> None:
            if self.version != version:
                raise StaleResult(
                    "the cache was rolled back, reordered or reset since this result was made; "
                    "read k and v before that"
                )

        k, v = held.k.view(padding, check), held.v.view(padding, check)
        return LayerView(k, v, padding)

    def verify(self, where: str = "") -> None:
        """Raise `NonFiniteError` if a deferred check failed; reads from the device."""
        good = self._held.good
        if good is not None and not bool(good):
            raise NonFiniteError(
                f"{where}tokens that were stored with deferred checks hold NaN, infinity or "
                "numbers beyond the method's range; forget them, and see what the model computes"
            )

    def dequantize(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens held, decompressed."""
        if side not in ("k", "v"):
            raise GeometryError(f"side {side!r} is not known; there are 'k' and 'v'")
        with self.lock:
            stream = self.k if side == "k" else self.v
            if stream is None:
                raise GeometryError("the layer holds no tokens yet")
            self.verify()
            return stream.decoded(0, stream.length, self._held.padding)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; nothing if there are no more than that."""
        with self.lock:
            self._held = self.truncated(length)
            if not self.clean:
                self.settle()

    def truncated(self, length: int) -> Held:
        """Return what is held without the tokens from `length` on; an append settles first."""
        held = self._held
        if held.k is None or held.v is None or length >= held.k.length:
            return held
        self.clean = False
        k = held.k.truncate(length, held.padding)
        v = held.v.truncate(length, held.padding)
        padding = held.padding if length else None
        ahead = held.ahead if length else None
        seen, last = held.seen, max(length - (ahead or k).learning[0], 0)
        seen = None if seen is None else seen[:, :, :last].clone()
        known = held.plan, held.good, seen, None, held.begin if length else 0, held.rungs, ahead
        return Held(k, v, padding, held.version + 1, *known)

    def let_go(self, kept: int) -> None:
        """Forget tokens in front of the last `kept`, as far as they fill whole segments."""
        with self.lock:
            held, streams = self._held, self._held.streams()
            first = min([held.length - kept, *(stream.tail_start for stream in streams)])
            if first < TILE or not streams:
                return
            least = lcm(TILE, *(stream.codec.group for stream in streams))
            sizes = [stream.segment_behind(first, least) for stream in streams]
            if not (first := first // lcm(*sizes) * lcm(*sizes)):
                return
            if not self.clean:
                self.settle()
            k, v = (stream.behind(first, size) for stream, size in zip(streams, sizes, strict=True))
            padding = None if held.padding is None else (held.padding - first).clamp(min=0)
            if padding is not None and not padding.any():
                padding = None
            # Views of what was held keep what they read.
            known = held.version, held.plan, held.good, held.seen, None, held.begin + first
            self._held = Held(k, v, padding, *known)

    def fork(self, make_store: MakeStore | None = None) -> CacheLayer:
        """Return a copy that shares slots until one side writes; with `make_store`, the lock."""
        with self.lock:
            if not self.clean:
                self.settle()
            other = self.empty()
            other.small = self.small
            if make_store is not None:
                other.lock, other._make_store = self.lock, make_store
            held = self._held
            if held.k is None or held.v is None:
                return other
            # First of all this side stops writing to what the other one is going to read.
            k, v = held.k.shared(), held.v.shared()
            self._held = held._replace(k=k, v=v, runner=None)
            k, v = k.fork(make_store, "k"), v.fork(make_store, "v")
            other._held, other.clean = held._replace(k=k, v=v, version=0, runner=None), self.clean
            return other

    def select(self, indices: Tensor) -> None:
        """Keep the given batch rows, in this order; rows may repeat."""
        with self.lock:
            held = self._held
            if held.k is None or held.v is None:
                return
            k, v = held.k.select(indices), held.v.select(indices)
            padding = None if held.padding is None else held.padding[indices.cpu()]
            self.clean = False
            seen = held.seen
            seen = None if seen is None else seen.index_select(0, indices.to(seen.device))
            known = held.plan, held.good, seen, None, held.begin, held.rungs
            ahead = held.ahead and held.ahead.select(indices)
            self._held = Held(k, v, padding, held.version + 1, *known, ahead)
            self.settle()  # What forks share may not have been clean.

    def streams(self) -> list[Stream]:
        """Return the streams, if there are any."""
        return self._held.streams()

    def reset(self) -> None:
        """Forget everything, the batch size included."""
        self.restore(None, None, None)

    def outdate(self) -> None:
        """Refuse views of what is held from now on: slots are about to lie elsewhere."""
        self._moved += 1

    def waiting_state(self) -> list[Tensor]:
        """Return what the layer's own codecs learnt, and are to learn, where no stream holds it."""
        held = [stream.codec for stream in self.streams()]
        codecs = [own for own in self.codecs or () if all(own is not codec for codec in held)]
        seen = [] if self._held.seen is None else [self._held.seen]
        return [*seen, *(tensor for codec in codecs for tensor in codec.state().values())]

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        with self.lock:
            held = [tensor for stream in self.streams() for tensor in stream.tensors()]
            return (
                held
                + self.waiting_state()
                + ([] if self._held.padding is None else [self._held.padding])
            )
