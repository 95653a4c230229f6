"""Lazy decompression: the tiles of a `DequantResult`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig, DequantResult, KVTile
from kvpact.kernels import CHUNK, LayerView, RowOffset, StreamPlan, StreamView, query_groups
from kvpact.kernels.torch.decode import read

if TYPE_CHECKING:
    from kvpact.cache.step import Step


def dequant_result(step: Step, q: Tensor | None, config: AttendConfig) -> DequantResult:
    """Return K and V of the tokens held and of new ones, decompressed when read.

    Over latents the result is what absorbed attention sees: K is `[c_kv, k_rope]`, V is `c_kv`, and
    there is no `logit_bias`.

    `step`: the tokens held before, and the new ones. Its lock is held while a tile of the past is
    read. `q`: `[B, H_q, new, D]`. With a method that has a bias (TurboQuant prod), K comes without
    it and the result has a `logit_bias` in units of the scaled logits; without q the bias is in K.
    """
    view, k, v = step.view, step.k, step.v
    # A latent is key and value at once: as a value it has to be whole.
    biased = view is not None and q is not None and view.k.codec.has_bias and not step.latent
    held = view.length if view is not None else 0

    def stored() -> Iterator[KVTile]:
        if view is not None:
            for start, end in view.chunks():
                with step.lock:
                    view.k.check()  # before each tile: a rollback may come between two
                    tile = _view_tile(step, view, start, end, q if biased else None, config)
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
            yield _absorbed(tile) if step.latent else tile

    return DequantResult(tiles, held + k.shape[2], biased)


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


def _absorbed(tile: KVTile) -> KVTile:
    """Return latents and rotated keys as the one key and the one value of absorbed attention."""
    keys = torch.cat([tile.k, tile.v], dim=-1)
    return KVTile(tile.start, tile.end, keys, tile.k, tile.logit_bias)


def _bias(view: LayerView, start: int, end: int, q: Tensor, config: AttendConfig) -> Tensor:
    """Return `softmax_scale * <R q, bias part of K>`: `[B, H_q, q_len, end - start]`."""
    scale = config.softmax_scale if config.softmax_scale is not None else q.shape[-1] ** -0.5
    part = read(view.k, start, end, view.k.codec.decode_bias)
    groups = query_groups(q.shape[1], part.shape[1], config)
    rotated = view.k.codec.transform.forward(q.float() * scale)
    return rotated @ part.repeat_interleave(groups, dim=1).mT
