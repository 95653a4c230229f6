"""A layer's first tokens in one call of a backend, as long as none of them has to be packed.

What depends on the shapes of a prompt alone is made for the first layer of a cache and serves the
others, since layers begin alike: a prompt within the window then takes one call of native code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kvpact.cache.held import Held
from kvpact.cache.quick import next_stream
from kvpact.cache.segments import SegmentList
from kvpact.cache.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import AttendCall, LayerView, Plan, StepRow, StepRunner
from kvpact.spec import Spec

if TYPE_CHECKING:
    from kvpact.cache.layer import CacheLayer


class First(NamedTuple):
    """What the first tokens of layers have in common: spec, kind, empty streams, plan, runner."""

    spec: Spec
    latent: bool
    k: Stream
    v: Stream
    plan: Plan
    runner: StepRunner


def first_attend(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> Tensor | None:
    """Carry out `CacheLayer.attend` for a layer that holds nothing; its lock is held.

    None where the ordinary way has to be taken; nothing is stored then.
    """
    first: First | None = layer.compute.empty.get(First)
    if first is None or layer._held.k is not None or not layer._clean or not _begins(layer):
        return None
    if first.spec is not layer.spec and first.spec != layer.spec:
        return None
    if first.latent is not layer._latent or not first.runner.fits(k, v, q, config):
        return None
    new = k.shape[2]
    k_next, v_next = next_stream(first.k, k, new), next_stream(first.v, v, new)
    if k_next is None or v_next is None:
        return None
    row = StepRow(first.runner, 0, k_next[1], v_next[1])
    output = first.runner.run((row,), k, v, q)
    if output is not None:
        held = layer._held
        layer._held = Held(k_next[0], v_next[0], None, held.version, first.plan)
        first.plan.count_step(1, 0)
    return output


def _begins(layer: CacheLayer) -> bool:
    """Whether a layer begins as others do: with no codec, store and offset of its own."""
    return layer._codecs is None and layer._offset is None and layer._make_store == SegmentList.new


def remember_first(
    layer: CacheLayer, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
) -> None:
    """Let other layers begin as this one just did, if they can; the lock is held."""
    compute, plan = layer.compute, layer._held.plan
    if plan is None or not plan.alike or compute.deferred or layer._held.padding is not None:
        return
    streams = layer.new_stream(k, True), layer.new_stream(v, False)
    new = k.shape[2]
    if not _begins(layer) or any(s.room_before(0) < new or s.learning[0] < new for s in streams):
        return
    k_view, v_view = (stream.view(None, _nothing) for stream in streams)
    call = AttendCall(LayerView(k_view, v_view, None), k, v, q, config, None, layer._latent)
    runner = plan.step(call)
    if runner is not None:
        compute.empty[First] = First(layer.spec, layer._latent, *streams, plan, runner)


def _nothing() -> None:
    """Stand for a check of slots, of which there are none."""
