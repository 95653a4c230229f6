"""Lazy decompression: the tiles of a `DequantResult`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvpact.contract import AttendConfig, DequantResult, KVTile
from kvpact.kernels.queries import query_groups
from kvpact.kernels.views import CHUNK, LayerView


def dequant_result(
    view: LayerView | None,
    k: Tensor,
    v: Tensor,
    q: Tensor | None,
    config: AttendConfig,
    lock: AbstractContextManager[Any],
    latent: bool = False,
) -> DequantResult:
    """Return K and V of the tokens held and of new ones, decompressed when read.

    Parameters
    ----------
    view : LayerView or None
        The tokens held before the new ones; None for an empty layer.
    k, v : Tensor
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`, the new tokens.
    q : Tensor or None
        `[B, H_q, new, D]`. With a method that has a bias (TurboQuant prod), K comes without it and
        the result has a `logit_bias` in units of the scaled logits; without q the bias is in K.
    config : AttendConfig
        The softmax' scale is what the bias needs.
    lock : lock
        Held while a tile of the past is read.
    latent : bool
        `k` and `v` are MLA latents and rotated keys. The result is what absorbed attention sees:
        K is `[c_kv, k_rope]`, V is `c_kv`, and there is no `logit_bias`.
    """
    # A latent is key and value at once: as a value it has to be whole.
    biased = view is not None and q is not None and view.k.codec.has_bias and not latent
    held = view.length if view is not None else 0

    def stored() -> Iterator[KVTile]:
        if view is not None:
            for start, end in view.chunks():
                with lock:
                    view.k.check()  # before each tile: a rollback may come between two
                    tile = _view_tile(
                        view, start, end, k.dtype, v.dtype, q if biased else None, config
                    )
                yield tile
        for start in range(0, k.shape[2], CHUNK):
            part = slice(start, start + CHUNK)
            bias = None
            if biased and q is not None:
                bias = torch.zeros(*q.shape[:3], k[:, :, part].shape[2], device=q.device)
            end = held + min(start + CHUNK, k.shape[2])
            yield KVTile(held + start, end, k[:, :, part], v[:, :, part], bias)

    def tiles() -> Iterator[KVTile]:
        for tile in stored():
            yield _absorbed(tile) if latent else tile

    return DequantResult(tiles, held + k.shape[2], biased)


def _view_tile(
    view: LayerView,
    start: int,
    end: int,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q: Tensor | None,
    config: AttendConfig,
) -> KVTile:
    bias = None
    if start >= view.k.exact_from:
        k = view.k.read_exact(start, end)
        if q is not None:
            bias = torch.zeros(*q.shape[:3], end - start, device=q.device)
    elif q is None:
        k = view.k.dequantize(start, end, k_dtype)
    else:
        k = view.k.dequantize_without_bias(start, end, k_dtype)
        bias = _bias(view, start, end, q, config)
    packed = start < view.v.exact_from
    v = view.v.dequantize(start, end, v_dtype) if packed else view.v.read_exact(start, end)
    return KVTile(start, end, k, v, bias)


def _absorbed(tile: KVTile) -> KVTile:
    """Return latents and rotated keys as the one key and the one value of absorbed attention."""
    keys = torch.cat([tile.k, tile.v], dim=-1)
    return KVTile(tile.start, tile.end, keys, tile.k, tile.logit_bias)


def _bias(view: LayerView, start: int, end: int, q: Tensor, config: AttendConfig) -> Tensor:
    """Return `softmax_scale * <R q, bias part of K>`: `[B, H_q, q_len, end - start]`."""
    scale = config.softmax_scale if config.softmax_scale is not None else q.shape[-1] ** -0.5
    part = view.k.read(start, end, view.k.codec.decode_bias)
    groups = query_groups(q.shape[1], part.shape[1], config)
    rotated = view.k.codec.transform.forward(q.float() * scale)
    return rotated @ part.repeat_interleave(groups, dim=1).mT
