"""Room for tokens to come, tokens packed in advance, steps taken back, tokens that wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.held import Held
from kvpact.cache.layer import CacheLayer
from kvpact.cache.reserve import room_for
from kvpact.cache.rungs import climbed
from kvpact.cache.stream import Stream
from kvpact.kernels import largest
from kvpact.quantizers.numbers import HALF_MAX
from kvpact.spec import Spec


def reserve(layers: Sequence[CacheLayer], tokens: int) -> None:
    """Make room for so many more tokens in layers, so that steps of a few allocate nothing."""
    wanted = Counter[torch.device]()
    for stream in (stream for layer in layers for stream in layer.streams()):
        like = stream.memory.tensor
        size = sum(field.bytes_per_token for field in stream.codec.fields)
        wanted[like.device] += like.shape[0] * like.shape[1] * int(size * tokens)
    with room_for(f"{tokens:,} more tokens", wanted):
        for layer in layers:
            with layer.lock:
                held = layer._held
                if held.k is None or held.v is None:
                    continue
                if not layer.clean:
                    layer.settle()
                k, v = held.k.reserved(tokens), held.v.reserved(tokens)
                layer._held = held._replace(k=k, v=v, runner=None)


def rewind(layer: CacheLayer, held: Held) -> None:
    """Let a layer hold again what it held before steps that made nothing lie elsewhere."""
    with layer.lock:
        layer.clean = False
        layer._held = held
        layer.settle()


def seal(layer: CacheLayer, tokens: int) -> None:
    """Pack up to `tokens` tokens, whole groups, the window's too, where slots may be written."""
    with layer.lock:
        if not layer.clean:
            layer.settle()
        held, made = layer._held, []
        for stream in held.streams():
            end = stream.store.writable(min(tokens, stream.length), stream.packed)
            if stream.codec.ready and stream.packed < end:
                append = stream.sealed(end, held.padding)
                layer.clean = False
                append.write()
                stream = append.after
            made.append(stream)
        if made:
            layer._held = held._replace(k=made[0], v=made[1], runner=None)
        layer.clean = True


class Moment(NamedTuple):
    """What a layer held at one moment: it can hold that again, to the byte, after appends."""

    layer: CacheLayer
    held: Held

    @classmethod
    def of(cls, layer: CacheLayer) -> Moment:
        """Return the present one."""
        return cls(layer, layer._held)

    def restore(self) -> None:
        """Let the layer hold that again, unless it was rolled back, reordered or reset since."""
        version = self.layer._held.version
        if version == self.held.version:
            # What carries out steps has counted those that came since.
            rewind(self.layer, self.held._replace(version=version + 1, runner=None))


class Wait(NamedTuple):
    """How many first tokens of a layer an engine may keep by itself, exact, before it stores them.

    None of them is packed then. Tokens with numbers below `k_limit` and `v_limit` can surely be
    stored; with `deferred` storing them is soon enough to look.
    """

    tokens: int
    dtype: torch.dtype
    k_limit: float
    v_limit: float
    deferred: bool

    @classmethod
    def of(cls, layer: CacheLayer, k: Tensor, v: Tensor) -> Wait:
        """Return it for a layer that is to hold tokens like `k` and `v` `[B, H_kv, T, D]`."""
        streams = key, value = layer.new_stream(k, True), layer.new_stream(v, False)
        tokens = min(
            s.room_before(0) if s.codec.ready or not s.codec.learns_from else s.learning[0]
            for s in streams
        )
        return cls(tokens, k.dtype, _limit(key), _limit(value), layer.compute.deferred)

    def holds(self, held: int, k: Tensor, v: Tensor) -> bool:
        """Return whether new tokens of a call may wait beside `held` that do."""
        new = k.shape[2]
        if held + new > self.tokens or v.shape[2] != new or not k.dtype is v.dtype is self.dtype:
            return False
        return not (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad))

    def fits(self, k: Tensor, v: Tensor) -> bool:
        """Return whether tokens can surely be stored later, by their numbers."""
        if self.deferred or not k.shape[2]:
            return True
        k_size, v_size = largest(k, v)
        return k_size < self.k_limit and v_size < self.v_limit


def _limit(stream: Stream) -> float:
    codec, form = stream.codec, stream.plan.form
    root = math.sqrt(stream.memory.tensor.shape[3] or 1)
    least = min(codec.max_abs, codec.max_norm) / root
    if codec.group > 1:
        return least
    return min(least, HALF_MAX / root if form is None else form.limit)


def go_down(layer: CacheLayer, tokens: int) -> None:
    """Let a layer hold its tokens by the spec of so many: K, then V, only one of them twice.

    What an interrupt leaves, with K gone down alone, goes on as any other state does.
    """
    with layer.lock:
        for key in (True, False):
            held = layer._held
            passed = [x for x in held.rungs[1:] if x[0] < tokens]
            if held.k is None or held.v is None or not passed:
                return
            if not layer.clean:
                layer.settle()
            now, last = held.rungs[0][1], passed[-1][1]
            then = Spec(last.key, now.value) if key else last
            left = [(n, Spec(last.key, spec.value)) for n, spec in passed] if key else []
            none = held.k.memory.tensor[:, :, :0], held.v.memory.tensor[:, :, :0]
            known = held.padding, held.seen, held.ahead
            steps, pair = [(0, now), (0, then)], (held.k, held.v)
            (k, v), _ = climbed(steps, pair, none, known, layer.new_stream)
            plan = layer.compute.plan(k.plan, v.plan, k.offset is not None, layer._latent)
            ahead = None if k.codec.learns_from else held.ahead
            seen = None if (ahead or k).codec.ready else held.seen
            rungs = [(0, then), *left, *held.rungs[1 + len(passed) :]]
            after = held.version, plan, held.good, seen, None, held.begin, rungs, ahead
            layer._held = Held(k, v, held.padding, *after)
