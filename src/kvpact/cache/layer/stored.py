"""The tokens of one call and the layer's past before it: all that attention needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig, DequantResult, KVTile
from kvpact.errors import GeometryError
from kvpact.kernels import (
    CHUNK,
    AttendCall,
    LayerView,
    Plan,
    RowOffset,
    StreamPlan,
    StreamView,
    query_groups,
)
from kvpact.kernels.torch.latent import KeyMaking
from kvpact.kernels.torch.slots import read


class Step(NamedTuple):
    """New tokens with a view of the past, which is read under the layer's lock.

    `k`, `v`: `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]` as given; with ``exact_new=False`` they
    are in `view`, as they are stored, and here are none. `padding`: `[B]` left-padding tokens;
    `plan`: the backends; `latent`: `k` and `v` are MLA latents and rotated keys.
    """

    view: LayerView | None
    k: Tensor
    v: Tensor
    padding: Tensor | None
    lock: AbstractContextManager[Any]
    plan: Plan
    latent: bool = False

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and the new tokens: `[B, H_q, q_len, D_v]` (latents: `r`).

        Raises
        ------
        GeometryError
            Heads or mask don't fit.
        StaleResult
            The cache was rolled back, reordered or reset since.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.attend(q, config)
        with self.lock:
            return self.plan.attend((self._call(q, config),))

    def attend_made(self, q: Tensor, config: AttendConfig, keys: KeyMaking) -> Tensor:
        """Attend as `attend` over a cache without keys (K = V), which `keys` makes by chunks."""
        with self.lock, torch.no_grad():
            return self.plan.attend_made(self._call(q, config), keys)

    def _call(self, q: Tensor, config: AttendConfig) -> AttendCall:
        if self.view is not None:
            self.view.k.check()
        k, v = (self.k, self.v) if self.k.shape[2] else (None, None)
        return AttendCall(self.view, k, v, q, config, self.padding, self.latent)

    def dequantize(self, q: Tensor | None, config: AttendConfig) -> DequantResult:
        """Return K and V of all tokens, decompressed when read; new ones may not change before.

        Over latents K is `[c_kv, k_rope]` and V is `c_kv`. With `q`, a method's bias is the
        result's `logit_bias`, without it is in K.
        """
        view, k, v = self.view, self.k, self.v
        # A latent is key and value at once: as a value it has to be whole.
        biased = view is not None and q is not None and view.k.codec.has_bias and not self.latent
        held = view.length if view is not None else 0

        def stored() -> Iterator[KVTile]:
            if view is not None:
                for start, end in view.chunks():
                    with self.lock:
                        view.k.check()  # before each tile: a rollback may come between two
                        tile = _view_tile(self, view, start, end, q if biased else None, config)
                    yield tile
            for start in range(0, k.shape[2], CHUNK):
                part = slice(start, start + CHUNK)
                bias = None
                if biased and q is not None:
                    shape = (*q.shape[:3], k[:, :, part].shape[2])
                    bias = q.new_zeros(shape, dtype=torch.float32)
                end = held + min(start + CHUNK, k.shape[2])
                yield KVTile(held + start, end, k[:, :, part], v[:, :, part], bias)

        def tiles() -> Iterator[KVTile]:
            for tile in stored():
                if self.latent:  # the one key and the one value of absorbed attention
                    keys = torch.cat([tile.k, tile.v], dim=-1)
                    tile = KVTile(tile.start, tile.end, keys, tile.k, tile.logit_bias)
                yield tile

        return DequantResult(tiles, held + k.shape[2], biased)


@torch.no_grad()
def attend_steps(steps: Sequence[Step], q: Tensor, configs: Sequence[AttendConfig]) -> Tensor:
    """Attend over many sequences' steps in one layer, each a row of `q`: `[N, H_q, q_len, D_v]`."""
    queries = torch.split(q, 1)
    if len(locks := {id(step.lock): step.lock for step in steps}) > 1:
        raise GeometryError("steps of different layers can't be one batch; attend to each")
    with next(iter(locks.values())):
        rows = zip(steps, queries, configs, strict=True)
        return steps[0].plan.attend([step._call(x, config) for step, x, config in rows])


def _view_tile(
    step: Step, view: LayerView, start: int, end: int, q: Tensor | None, config: AttendConfig
) -> KVTile:
    bias = None
    if start >= view.k.exact_from:
        k = view.k.exact(start, end)
        if q is not None:
            bias = q.new_zeros(*q.shape[:3], end - start, dtype=torch.float32)
    elif q is None:
        k = _decoded(step.plan.k, view.k, start, end, step.k.dtype)
    else:
        k = _without_bias(view.k, start, end, step.k.dtype)
        bias = _bias(view, start, end, q, config)
    if start >= view.v.exact_from:
        v = view.v.exact(start, end)
    else:
        v = _decoded(step.plan.v, view.v, start, end, step.v.dtype)
    return KVTile(start, end, k, v, bias)


def _decoded(
    plan: StreamPlan, view: StreamView, start: int, end: int, dtype: torch.dtype
) -> Tensor:
    batch, heads, _, dim = view.tail.shape
    out = view.tail.new_empty(batch, heads, end - start, dim, dtype=dtype)
    plan.decode(view, start, end, out)
    return out


def _without_bias(view: StreamView, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return packed tokens less the part that the bias covers."""
    codec = view.codec
    y = read(view, start, end, lambda arrays: codec.decode(arrays) - codec.decode_bias(arrays))
    x = codec.transform.inverse(y)
    if isinstance(view.offset, RowOffset):
        x = view.offset.put_back(x.clone(), start)
    return view.place_sinks(saturated(x, dtype), start, lambda x: x)


def _bias(view: LayerView, start: int, end: int, q: Tensor, config: AttendConfig) -> Tensor:
    """Return `softmax_scale * <R q, bias part of K>`: `[B, H_q, q_len, end - start]`."""
    scale = config.softmax_scale if config.softmax_scale is not None else q.shape[-1] ** -0.5
    part = read(view.k, start, end, view.k.codec.decode_bias)
    groups = query_groups(q.shape[1], part.shape[1], config)
    rotated = view.k.codec.transform.forward(q.float() * scale)
    return rotated @ part.repeat_interleave(groups, dim=1).mT
