"""Steps of a few tokens in one call of a backend: what most calls of a decoding engine are.

The ordinary way (`CacheLayer.prepare`, `commit`) defines what a step does. This one is taken where
the state has a `StepRunner`, made for calls that are alike, and no group was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kvpact.cache.held import Held, sink_positions
from kvpact.cache.stream import MOST_STEP, Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import AttendCall, StepRunner, StepTokens

if TYPE_CHECKING:
    from kvpact.cache.layer import CacheLayer


def quick_attend(
    layer: CacheLayer,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    max_tokens: int | None = None,
) -> Tensor | None:
    """Carry out `CacheLayer.attend` in one call of a backend.

    Parameters
    ----------
    layer : CacheLayer
        The layer.
    k, v, q, config
        As of `CacheLayer.attend`, not yet checked.
    max_tokens : int, optional
        The layer may not hold more than so many.

    Returns
    -------
    Tensor or None
        The output. None where the ordinary way has to be taken; nothing is stored then.
    """
    if layer._held.runner is None:
        return None
    with layer.lock:
        held = layer._held
        runner = held.runner
        if runner is None or not layer._clean or not runner.fits(k, v, q, config):
            return None
        step = quick_step(held, k, v)
        if step is None or (max_tokens is not None and step.length > max_tokens):
            return None
        runner = moved(layer, step, k, v, q, config)
        if runner is None:
            return None
        layer._clean = False
        output = runner.run(k, v, q, step.length - k.shape[2], step.sides)
        if output is not None:
            layer._held = (
                step.after if runner is held.runner else step.after._replace(runner=runner)
            )
            assert held.plan is not None
            held.plan.count_step(1, step.encodes)
        layer._clean = True
        return output


class QuickStep(NamedTuple):
    """A layer's step: what it holds afterwards, and how K and V take the new tokens."""

    after: Held
    length: int
    sides: tuple[StepTokens, StepTokens]
    encodes: int


def quick_step(held: Held, k: Tensor, v: Tensor, row: int | None = None) -> QuickStep | None:
    """Return the step that new tokens make; None where it has to be made the ordinary way.

    `row` says which row of `k` and `v` they are, where they are not all. Memory of the tail that
    nobody reads may be written to.
    """
    if held.k is None or held.v is None:
        return None
    k_next, v_next = _next(held.k, k, row), _next(held.v, v, row)
    if k_next is None or v_next is None:
        return None
    (k_after, k_side), (v_after, v_side) = k_next, v_next
    held_before = held.k.tail_start + k_side.tail.shape[2]
    if held_before != held.v.tail_start + v_side.tail.shape[2]:
        return None
    length = held_before + k.shape[2]
    _, _, padding, version, plan, good, runner = held
    after = Held(k_after, v_after, padding, version, plan, good, runner)
    return QuickStep(after, length, (k_side, v_side), bool(k_side.encoded) + bool(v_side.encoded))


def _next(stream: Stream, x: Tensor, row: int | None) -> tuple[Stream, StepTokens] | None:
    """Return the stream after new tokens, and how it takes them."""
    codec, window, plan, store, packed, tail, tail_start, spare, sinks = stream
    new = x.shape[2]
    batch, heads, in_tail, dim = tail.shape
    group, held = codec.group, tail_start + in_tail
    length = held + new
    if packed % group or held - packed >= group:
        return None  # a group that was cut
    after = length - length % group
    count = after - packed
    if count:
        store = store.grown(after, packed)
    if not in_tail and after == length and not window:  # no token is kept
        side = StepTokens(held, tail, 0, False, packed, count, -1)
        return Stream(codec, window, plan, store, after, tail, after, spare, sinks), side
    # As of `Stream.exact_from`, before; and where the tail begins afterwards.
    exact_from = max(tail_start, min(packed, max(held - window, 0)))
    begin = max(length - window, 0)
    start = max(tail_start, min(after, begin - begin % group))
    inside = packed - tail_start if count and group > 1 else -1
    keep = in_tail > 0 and spare >= new
    if inside >= 0 and not keep:
        return None  # the group's tokens have to lie in one piece
    strides = tail.stride()
    if in_tail and dim > 1 and strides[3] != 1:
        return None
    side = StepTokens(exact_from, tail, exact_from - tail_start, keep, packed, count, inside)
    if start == length:
        if in_tail:  # no token is kept any more, and neither is their memory
            tail, spare = tail.new_empty(batch, heads, 0, dim), 0
    elif keep:
        offset = tail.storage_offset() + (start - tail_start) * strides[2]
        tail = tail.as_strided((batch, heads, length - start, dim), strides, offset)
        spare -= new
    else:
        tail, spare = stream._next_tail(x if row is None else x[row : row + 1], start)
    return Stream(codec, window, plan, store, after, tail, start, spare, sinks), side


def moved(
    layer: CacheLayer,
    step: QuickStep,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    row: int | None = None,
) -> StepRunner | None:
    """Return the step's runner, or another one where slots came to lie elsewhere."""
    runner, after = step.after.runner, step.after
    assert runner is not None and after.k is not None and after.v is not None
    sources = after.k.store.source(), after.v.store.source()
    if runner.sources[0] is sources[0] and runner.sources[1] is sources[1]:
        return runner
    if row is not None:
        k, v, q = (x[row : row + 1] for x in (k, v, q))
    return _made(layer, after, k, v, q, config)


def _made(
    layer: CacheLayer, held: Held, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> StepRunner | None:
    """Return a runner for steps from a state on, in which the new tokens may be."""
    assert held.plan is not None
    view = layer._view(held, held.padding)
    return held.plan.step(AttendCall(view, k, v, q, config, held.padding, layer._latent))


def make_runner(layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> None:
    """Let a layer take its next steps in one call each, if it just took one a second time."""
    this = (k.shape, k.stride(), v.stride(), q.shape, q.stride(), q.dtype)
    again, layer._last = layer._last == this, this
    held = layer._held
    streams = held.streams()
    if not again or k.shape[2] > MOST_STEP or not streams or held.plan is None:
        return
    if any(sink_positions(s, held.padding)[1] > s.length for s in streams):
        return  # sink tokens are still to come
    runner = _made(layer, held, k, v, q, config)
    if runner is not None:
        layer._held = held._replace(runner=runner)
