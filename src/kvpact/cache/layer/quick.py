"""Attending calls, and steps of a few tokens in one call of a backend, which most of them are.

The ordinary way (`attend`) defines what a step does. `quick_attend` is taken where the state has a
`StepRunner`, made for calls of one kind, and no group was cut.
"""

from __future__ import annotations

from math import inf

from torch import Tensor

from kvpact.cache.layer.held import Held, Sizes, next_seen
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.prompt import Prompt
from kvpact.cache.stream.advance import MOST_STEP, advance, next_memory
from kvpact.cache.stream.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import AttendCall, StepRow, StepRunner, StepTokens, check_queries
from kvpact.methods.context import Context
from kvpact.units import unit_of

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own constructor


def attend(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, sizes: Sizes
) -> Tensor:
    """Attend over the tokens held and the new ones, and store these; the layer's lock is held."""
    if layer._held.plan and make_runner(layer, k, v, q, config):
        output = _run_step(layer, k, v, q, config)
        if output is not None:
            return output
    plan = layer.prepare(k, v, config, q, sizes)
    if config.exact_new:
        output = plan.step.attend(q, config)
        layer.commit(plan)
        return output
    check_queries(q, k.shape[1], layer.length + k.shape[2], config)
    return layer.commit(plan).attend(q, config)


def quick_attend(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, max_tokens: int | None
) -> Tensor | None:
    """Carry out `attend` in one call of a backend; None, nothing stored, if it can't."""
    if layer._held.plan is None:
        return None
    with layer.lock:
        held = layer._held
        runner = held.runner
        if runner is None and held.plan is not None:
            runner = held.plan.last_runner
        if runner is None or not layer.clean or not runner.fits(k, v, q, config):
            return None
        if max_tokens is not None and held.length + k.shape[2] > max_tokens:
            return None
        # A call like those of other layers has passed their checks.
        if held.runner is None and not make_runner(layer, k, v, q, config, runner):
            return None
        return _run_step(layer, k, v, q, config)


def quick_first(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, known: Prompt
) -> Tensor | None:
    """Carry out `attend` with first tokens as `known` did; None, nothing stored, if it can't."""
    held = layer._held
    if type(layer) is not CacheLayer or held.k is not None or not layer.begins_anew:
        return None
    found = known.attend(held, k, v, q, config)
    if found is None:
        return None
    layer._held, output = found
    return output


def _run_step(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> Tensor | None:
    held = layer._held
    if held.until != inf and held.length + k.shape[2] > held.until:
        return None
    step, plan = quick_step(layer, k, v, q, config), layer._held.plan
    if step is None or plan is None:
        return None
    after, row = step
    layer.clean = False
    output = row.runner.run((row,), k, v, q)
    if output is not None:
        layer._held = after
        plan.count(attend=1, encode=(row.k.encoded > 0) + (row.v.encoded > 0))
    layer.clean = True
    return output


def quick_step(
    layer: CacheLayer,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    index: int | None = None,
    stay: bool = False,
) -> tuple[Held, StepRow] | None:
    """Return what a layer, row `index` of many, holds after a step, and a backend's part.

    None where it can't; `stay`: slots lie where they lay.
    """
    k_before, v_before, padding, version, plan, good, seen, runner, *more = layer._held
    if k_before is None or v_before is None or runner is None:
        return None
    held, new = k_before.length, k.shape[2]
    if not k_before.packed and held + new > k_before.learning[0]:
        rows = slice(None) if index is None else slice(index, index + 1)
        seen = next_seen(layer._held, k_before, k[rows], q[rows])
    k_next, v_next = (
        next_stream(k_before, k, new, index, padding),
        next_stream(v_before, v, new, index, padding),
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
        state = layer._held._replace(k=k_after, v=v_after, seen=seen)
        runner = _made(layer, state, k, v, q, config, None if good is not None else runner)
        if runner is None:
            return None
    if runner.good is not None:
        good = runner.good
    after = _new(Held, (k_after, v_after, padding, version, plan, good, seen, runner, *more))
    return after, _new(StepRow, (runner, held, k_tokens, v_tokens))


def counted(layer: CacheLayer, new: int) -> Held | None:
    """Return what a layer holds after a step by a device; None where it packs, or has no room."""
    held, streams = layer._held, []
    if held.length + new > held.until:
        return None
    for stream in held.streams():
        now, kept = stream.advanced(new), stream.tail_start < stream.length
        several = stream.codec.group > 1 or stream.window
        full = stream.store.grown(now.packed, stream.packed) is not stream.store
        if full or (several and now.packed != stream.packed) or not stream.codec.ready:
            return None
        # A device leaves the tail where it begins.
        if not (now.stays and now.tail == stream.tail_start if kept else now.tail == now.length):
            return None
        packed, start, length, spare, _ = now
        streams.append(stream._replace(packed=packed, tail_start=start, length=length, spare=spare))
    k, v = streams
    return held._replace(k=k, v=v)


def next_stream(
    stream: Stream, x: Tensor, new: int, index: int | None = None, padding: Tensor | None = None
) -> tuple[Stream, StepTokens] | None:
    """Return the stream after new tokens, and how it takes them."""
    codec, window, plan, store, packed, memory, tail_start, held, spare, sinks, count, offset = (
        stream
    )
    group, unit = codec.group, unit_of(codec.group, window)
    now = advance(packed, tail_start, held, spare, new, unit, window)
    if now.packed > packed and not codec.ready:
        now = advance(packed, tail_start, held, spare, new, unit, window, codec.learns_from)
        if now.packed > packed:
            return None  # it learns now
    after, start, length, room, stays = now
    fresh = after - packed
    if start and count and sinks is None:
        return None  # sinks are still to be copied
    if fresh:
        if group > 1 and (packed % group or not _plain(stream, padding)):
            return None  # a group that was cut, or with sinks or padding
        store = store.grown(after, packed)
    if tail_start == held and start == length:  # no token is kept
        side = _new(StepTokens, (held, memory, False, packed, fresh, False))
    else:
        # Tokens that are packed have to lie in one piece, also those whose tail moves then.
        joined = fresh > 0 and after > held
        keep = stays or (joined and tail_start < held and spare >= new)
        if (joined and not keep) or not memory.dense:
            return None
        side = _new(StepTokens, (tail_start, memory, keep, packed, fresh, fresh > 0))
        if not stays:
            x = x if index is None else x[index : index + 1]
            memory = next_memory(memory, held, x, now)
    known = (codec, window, plan, store, after, memory, start, length, room, sinks, count, offset)
    return _new(Stream, known), side


def _made(
    layer: CacheLayer,
    held: Held,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    like: StepRunner | None = None,
) -> StepRunner | None:
    """Return a runner for steps from a state on, in which the new tokens may be."""
    assert held.plan is not None
    view = layer._view(held, held.padding)
    made = like.over(view) if like is not None and view is not None else None
    if made is not None:
        return made
    call = AttendCall(view, k, v, q, config, held.padding, layer._latent)
    # Steps change the flag; the state that they begin from keeps its own.
    return held.plan.step(call, None if held.good is None else held.good.clone())


def _plain(stream: Stream, padding: Tensor | None) -> bool:
    """Return whether the groups to come have neither sinks nor padding."""
    return stream.packed >= Context(padding, stream.num_sinks).end


def make_runner(
    layer: CacheLayer,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    config: AttendConfig,
    like: StepRunner | None = None,
) -> bool:
    """Let a layer take steps like this one in one call each; False where it can't, or does."""
    held = layer._held
    if k.shape[2] > MOST_STEP or held.k is None or held.v is None or not layer.clean:
        return False
    if not held.k.length or held.plan is None or not held.plan.one_backend:
        return False
    if held.runner is not None and held.runner.fits(k, v, q, config):
        return False
    for x, stream in (k, held.k), (v, held.v):
        if x.shape[:2] != stream.memory.tensor.shape[:2]:
            return False
        if stream.sinks is not None and stream.length < stream.sink_positions(held.padding)[1]:
            return False  # sink tokens are still to come
    runner = _made(layer, held, k, v, q, config, like)
    if runner is not None:
        layer._held = held._replace(runner=runner)
    return runner is not None
