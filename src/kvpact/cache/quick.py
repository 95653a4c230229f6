"""Steps of a few tokens in one call of a backend: what most calls of a decoding engine are.

The ordinary way (`CacheLayer.prepare`, `commit`) defines what a step does. This one is taken where
the state has a `StepRunner`, made for calls that are alike, and no group was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvpact.cache.held import Held
from kvpact.cache.stream import MOST_STEP, Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import AttendCall, StepRow, StepRunner, StepTokens
from kvpact.methods.context import Context

if TYPE_CHECKING:
    from kvpact.cache.layer import CacheLayer

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own constructor


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
        step = quick_step(layer, k, v, q, config)
        if step is None or (max_tokens is not None and held.length + k.shape[2] > max_tokens):
            return None
        after, row = step
        layer._clean = False
        output = row.runner.run((row,), k, v, q)
        if output is not None:
            layer._held = after
            assert held.plan is not None
            held.plan.count_step(1, encodes(row))
        layer._clean = True
        return output


def encodes(row: StepRow) -> int:
    """Return how many streams of a row pack tokens."""
    return (row.k.encoded > 0) + (row.v.encoded > 0)


def quick_step(
    layer: CacheLayer,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    index: int | None = None,
    stay: bool = False,
) -> tuple[Held, StepRow] | None:
    """Return what a layer holds after a step, and what a backend has to do.

    Memory behind the tail, that nobody reads, may be written to.

    Parameters
    ----------
    layer : CacheLayer
        Has a runner, which fits.
    k, v, q, config
        The call's.
    index : int, optional
        Which row of the tensors is the layer's, where it is one of many.
    stay : bool
        The slots are known to lie where they lay.

    Returns
    -------
    tuple or None
        None where the step has to be made the ordinary way.
    """
    k_before, v_before, padding, version, plan, good, seen, runner = layer._held
    if k_before is None or v_before is None or runner is None:
        return None
    held, new = k_before.length, k.shape[2]
    k_next, v_next = (
        _next(k_before, k, new, index, padding),
        _next(v_before, v, new, index, padding),
    )
    if k_next is None or v_next is None or held != v_before.length:
        return None
    (k_after, k_tokens), (v_after, v_tokens) = k_next, v_next
    k_source, v_source = runner.sources
    if not stay and (
        k_source is not k_after.store.source() or v_source is not v_after.store.source()
    ):
        if index is not None:
            k, v, q = (x[index : index + 1] for x in (k, v, q))
        runner = _made(layer, Held(k_after, v_after, padding, version, plan, good), k, v, q, config)
        if runner is None:
            return None
    if runner.good is not None:
        good = runner.good
    after = _new(Held, (k_after, v_after, padding, version, plan, good, seen, runner))
    return after, _new(StepRow, (runner, held, k_tokens, v_tokens))


def counted(layer: CacheLayer, new: int) -> Held | None:
    """Return what a layer holds after a step that a device carried out by itself.

    Parameters
    ----------
    layer : CacheLayer
        Has a runner.
    new : int
        New tokens, for which there was room.

    Returns
    -------
    Held or None
        None for a step that packs a group of tokens, or has no room.
    """
    held, streams = layer._held, []
    for stream in held.streams():
        length, group = stream.length + new, stream.codec.group
        packed = length - length % group
        full = stream.store.grown(packed, stream.packed) is not stream.store
        kept = stream.tail_start < stream.length
        if full or (group > 1 and packed != stream.packed) or stream.packed % group:
            return None
        if (kept and stream.spare < new) or (not kept and (stream.window or packed < length)):
            return None
        start = max(stream.tail_start, stream._exact_start(packed, length, group))
        spare = stream.spare - new if kept else stream.spare
        streams.append(stream._replace(packed=packed, tail_start=start, length=length, spare=spare))
    k, v = streams
    return held._replace(k=k, v=v)


def _next(
    stream: Stream, x: Tensor, new: int, index: int | None, padding: Tensor | None
) -> tuple[Stream, StepTokens] | None:
    """Return the stream after new tokens, and how it takes them."""
    codec, window, plan, store, packed, memory, tail_start, held, spare, sinks, offset = stream
    group, length = codec.group, held + new
    if packed % group or held - packed >= group:
        return None  # a group that was cut
    after = length - length % group
    count = after - packed
    if count:
        if group > 1 and not _plain(stream, padding):
            return None  # a group with sinks or padding
        store = store.grown(after, packed)
    if tail_start == held and after == length and not window:  # no token is kept
        taken = _new(StepTokens, (held, memory, False, packed, count, False))
        fields = (codec, window, plan, store, after, memory, length, length, spare, sinks, offset)
        return _new(Stream, fields), taken
    # As of `Stream.exact_from`, before; and where the tail begins afterwards.
    exact_from = max(tail_start, min(packed, max(held - window, 0)))
    begin = max(length - window, 0)
    start = max(tail_start, min(after, begin - begin % group))
    inside = count > 0 and group > 1
    keep = tail_start < held and spare >= new
    if inside and not keep:
        return None  # the group's tokens have to lie in one piece
    if not memory.dense:
        return None
    side = StepTokens(exact_from, memory, keep, packed, count, inside)
    if keep and start < length:
        spare -= new
    else:
        memory, spare = stream.next_memory(x if index is None else x[index : index + 1], start)
    after_step = codec, window, plan, store, after, memory, start, length, spare, sinks, offset
    return _new(Stream, after_step), side


def _made(
    layer: CacheLayer, held: Held, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> StepRunner | None:
    """Return a runner for steps from a state on, in which the new tokens may be."""
    assert held.plan is not None
    view = layer._view(held, held.padding)
    call = AttendCall(view, k, v, q, config, held.padding, layer._latent)
    # Steps change the flag; the state that they begin from keeps its own.
    return held.plan.step(call, None if held.good is None else held.good.clone())


def _plain(stream: Stream, padding: Tensor | None) -> bool:
    """Whether the groups to come have neither sinks nor padding."""
    sinks = 0 if stream.sinks is None else stream.sinks.shape[2]
    return stream.packed >= Context(padding, sinks).end


def make_runner(layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> None:
    """Let a layer take its next steps in one call each, if it just took one a second time."""
    this = (k.shape, k.stride(), v.stride(), q.shape, q.stride(), q.dtype)
    again, layer._last = layer._last == this, this
    held = layer._held
    streams = held.streams()
    if not again or k.shape[2] > MOST_STEP or not streams or held.plan is None:
        return
    if any(s.sink_positions(held.padding)[1] > s.length for s in streams):
        return  # sink tokens are still to come
    if not all(s.codec.ready for s in streams):
        return  # a codec is still to see what it learns from
    runner = _made(layer, held, k, v, q, config)
    if runner is not None:
        layer._held = held._replace(runner=runner)
