"""A layer that goes down its ladder before a call's tokens come, see `ladder`."""

from __future__ import annotations

from kvpact.cache.held import Held
from kvpact.cache.layer import CacheLayer
from kvpact.cache.rungs import climbed
from kvpact.spec import Spec


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
