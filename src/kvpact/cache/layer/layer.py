"""One layer of a cache: its two streams, its padding and its lock."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from kvpact.cache.layer.held import (
    Held,
    LayerPlan,
    Pair,
    Sizes,
    next_padding,
    next_seen,
    placed,
)
from kvpact.cache.layer.prompt import Prompt, prompt_key
from kvpact.cache.layer.stored import Step
from kvpact.cache.stream.codecs import codec_of, small_sizes
from kvpact.cache.stream.segments import MakeStore, SegmentList
from kvpact.cache.stream.stream import AppendPlan, Stream
from kvpact.contract import AttendConfig
from kvpact.errors import CorruptState, GeometryError, NonFiniteError, StaleResult
from kvpact.kernels import Compute, LayerView, largest
from kvpact.kernels.offset import known_by_position
from kvpact.key_offset import KeyOffset
from kvpact.methods import Codec
from kvpact.methods.scaled import LEAST, ScaledCodec, scaled_for, size_of
from kvpact.quantizers.checks import collected
from kvpact.spec import Spec


class CacheLayer:
    """K and V of one layer.

    What is held is one immutable value, exchanged by one assignment. So an exception, whatever it
    is and wherever it comes from, leaves the layer as it was before the call or as it is after it.
    Slots that an append was about to fill lie after all that the value speaks of; the next
    operation clears them. Whoever calls the parts of an append, `truncated` or `settle` holds the
    lock: the layer's own, or one that several sequences have in common. `codecs` are made with the
    first tokens if omitted.
    """

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
        self._held = Held()
        # Whether slots of tokens that are not held are zero; False before any is written.
        self.clean = True
        self._moved = 0  # how often slots came to lie elsewhere; changed under a pool's lock

    @property
    def spec(self) -> Spec:
        """The spec by which tokens are stored now."""
        return self._spec

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
        """Describe what is held."""
        held = self._held
        padding = "" if held.padding is None else f", padding={held.padding.tolist()}"
        state = f"length={self.length}{padding}, version={held.version}, clean={self.clean}"
        return f"{type(self).__name__}({str(self.spec)!r}, {state}, k={held.k!r}, v={held.v!r})"

    def store(
        self, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig, sizes: Sizes = None
    ) -> Step:
        """Store new tokens and return them with a view of the past."""
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
        held, padding, pair = self._begun(k, v, config, sizes, self._spec)
        call, key, prompts = (k, v, q), None, self.compute.prompts
        if sizes and held.k is None and padding is None:
            key = prompt_key(pair, k, v, q)
            known: Prompt | None = prompts.get(key)
            plan = known.take(call, sizes, held, self.lock, config) if known else None
            if plan is not None:
                self.compute.repeats = known
                return plan
        seen = next_seen(held, pair[0], k, q)
        k_size, v_size = (None, None) if sizes is None else sizes[:2]
        k_append = pair[0].prepare(k, padding, seen, k_size)
        appends = [k_append, pair[1].prepare(v, padding, None, v_size)]
        seen = None if k_append.after.codec.ready else seen
        if key is not None and key not in prompts:
            prompts[key] = Prompt.like(pair, appends, call, self.compute, self._spec, self._latent)
        return self._planned(held, appends, (k, v), padding, seen, config)

    def _begun(
        self, k: Tensor, v: Tensor, config: AttendConfig, sizes: Sizes, spec: Spec
    ) -> tuple[Held, Tensor | None, Pair]:
        """Return what is held and clean, each row's padding, and streams for new tokens."""
        if not self.clean:
            self.settle()
        held, padding = self._held, self._held.padding
        if config.padding is not None:
            padding = next_padding(held, config.padding, k.shape[0])
        if held.k is None:
            if sizes is None and not (self.compute.deferred or k.is_meta):
                sizes = largest(k, v)
            shared = None if self._make_store == SegmentList.new else self.codecs
            small = sizes if sizes and min(sizes[:2]) < LEAST else None
            self.small = small_sizes(small, shared) if small else (0.0, 0.0)
        k_stream = held.k or self.new_stream(k, True, spec=spec)
        v_stream = held.v or self.new_stream(v, False, spec=spec)
        if k_stream.offset is not None:
            k_stream = placed(k_stream, held, config, padding)
        return held, padding, (k_stream, v_stream)

    def _planned(
        self,
        held: Held,
        appends: list[AppendPlan],
        new: tuple[Tensor, Tensor],
        padding: Tensor | None,
        seen: Tensor | None,
        config: AttendConfig,
    ) -> LayerPlan:
        """Return the plan of appends to both streams, with a step of the `new` tokens."""
        k, v, plan, good = appends[0].after, appends[1].after, held.plan, held.good
        if plan is None or (plan.k, plan.v) != (k.plan, v.plan):
            plan = self.compute.plan(k.plan, v.plan, k.offset is not None, self._latent)
        if self.compute.deferred:
            found = collected()
            good = found if good is None or found is None else good & found
        after = held._replace(k=k, v=v, padding=padding, plan=plan, good=good, runner=None)
        self.compute.repeats = None
        past = self._view(held, padding)
        step = Step(past, new[0], new[1], padding, self.lock, plan, self._latent)
        return LayerPlan(
            held, after._replace(seen=seen), appends, step, config.exact_new, self.clean
        )

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
        self.clean = plan.clean
        if plan.exact_new:
            return plan.step
        k, v = plan.step.k[:, :, :0], plan.step.v[:, :, :0]
        return plan.step._replace(view=self._view(self._held, plan.step.padding), k=k, v=v)

    def settle(self) -> None:
        """Zero the slots of tokens that are not held; shared ones wait until they are copied."""
        self.clean = all([x.store.clear_from(x.packed) for x in self._held.streams()])

    def restore(self, held: Held) -> None:
        """Hold other streams from now on, whose slots are clean."""
        with self.lock:
            self._held = held._replace(version=self._held.version + 1, runner=None)
            k, v = held.k, held.v
            self.small = (size_of(k.codec), size_of(v.codec)) if k and v else (0.0, 0.0)
            self.clean = True

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens, so that steps of a few allocate nothing."""
        with self.lock:
            held = self._held
            if held.k is not None and held.v is not None:
                if not self.clean:
                    self.settle()
                k, v = held.k.reserved(tokens), held.v.reserved(tokens)
                self._held = held._replace(runner=None, k=k, v=v)

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
        # Layers begin the same way, and a stream never changes.
        kind = codec, method, self._make_store, batch, heads, dim, x.dtype, x.device
        stream = known.get(kind)
        if stream is None:
            store = self._make_store(codec, batch, heads, x.device, "k" if key else "v")
            plan = self.compute.stream(codec, x.device, x.dtype)
            stream = Stream.empty(codec, x, method.sinks, method.window, store, plan)
            if self._make_store == SegmentList.new and not codec.state():
                known[kind] = stream
        if self.offset is None and codec.rotation is None:
            return stream
        return stream._replace(offset=known_by_position(codec, key, self.offset))

    def empty(self) -> CacheLayer:
        """Return a layer like this one that holds nothing."""
        return type(self)(
            self._spec, self._make_store, self.codecs, self._latent, self.compute, None, self.offset
        )

    def paced(self, held: Held, rows: Tensor | None = None) -> Held:
        """Return what is held after a change, of the batch rows given; see `BudgetLayer`."""
        return held

    @property
    def begins_anew(self) -> bool:
        """Whether first tokens find streams that layers of one spec have in common."""
        own = self.codecs is None and self.offset is None and not any(self.small) and self.clean
        return own and self._make_store == SegmentList.new

    def learner(self, k: Stream, padding: Tensor | None) -> Stream:
        """Return the stream of keys, here `k`, whose codec is to learn from queries."""
        return k

    def knows_positions(self) -> bool:
        """Return whether keys lack, or will lack, something that depends on positions."""
        return self.k is not None and self.k.offset is not None

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

        return LayerView(held.k.view(padding, check), held.v.view(padding, check), padding)

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
        first, seen = self.learner(k, padding).learning[0], held.seen
        seen = None if seen is None else seen[:, :, : max(length - first, 0)].clone()
        begin = held.begin if length else 0
        after = held._replace(k=k, v=v, padding=padding, seen=seen, runner=None, begin=begin)
        return self.paced(after._replace(version=held.version + 1))

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
            after = held._replace(k=k, v=v, padding=padding, seen=seen, runner=None)
            self._held = self.paced(after._replace(version=held.version + 1), indices)
            self.settle()  # What forks share may not have been clean.

    def streams(self) -> list[Stream]:
        """Return the streams, if there are any."""
        return self._held.streams()

    def reset(self) -> None:
        """Forget everything, the batch size included."""
        self.restore(Held())

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
            padding = [] if self._held.padding is None else [self._held.padding]
            return held + self.waiting_state() + padding
