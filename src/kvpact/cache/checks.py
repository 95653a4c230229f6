"""Checks of what may be stored: every wrong input is named before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvpact.contract import TOO_LARGE, AttendConfig, check_dense
from kvpact.errors import DeviceError, DtypeError, GeometryError, LayerIndexError, NonFiniteError
from kvpact.geometry import CacheGeometry
from kvpact.kernels import check_latent_config, largest, query_groups
from kvpact.key_offset import KeyOffset
from kvpact.quantizers.checks import checks_are_deferred, require_finite
from kvpact.snapshot import Snapshot
from kvpact.snapshot.state import CacheState

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_layer(layer: int, num_layers: int) -> None:
    """Raise `LayerIndexError` unless the layer is there."""
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise LayerIndexError(f"layer {layer!r} is not one of 0 ... {num_layers - 1}")


def check_tokens(
    geometry: CacheGeometry, k: Tensor, v: Tensor, q: Tensor | None, held: Tensor | None
) -> list[float] | None:
    """Raise a named error unless new tokens fit the geometry, each other and what is held.

    Returns the largest magnitudes in k, v and q; None where checks are deferred.
    """
    heads = geometry.num_kv_heads
    given: list[tuple[str, Tensor, int | None, int]]
    given = [("k", k, heads, geometry.head_dim), ("v", v, heads, geometry.value_dim)]
    if q is not None:
        given.append(("q", q, None, geometry.query_dim))
    for name, x, wanted_heads, dim in given:
        _check_tensor(name, x, wanted_heads, dim)
    batch, _, new, _ = k.shape
    for name, x, _, _ in given[1:]:
        if (x.shape[0], x.shape[2]) != (batch, new):
            raise GeometryError(
                f"{name} has batch {x.shape[0]} and {x.shape[2]} tokens, k has {batch} and {new}"
            )
        if x.device != k.device:
            raise DeviceError(f"{name} is on {x.device}, k on {k.device}; move one of them")
    wanted = held.dtype if held is not None else geometry.dtype
    for name, x in (("k", k), ("v", v)):
        if x.dtype != (wanted or k.dtype):
            raise DtypeError(f"{name} is {x.dtype}, the cache holds {wanted or k.dtype}; cast it")
    if held is not None:
        if held.shape[0] != batch:
            raise GeometryError(
                f"batch {batch}, but the cache holds {held.shape[0]} rows; reset, select or repeat"
            )
        if held.device != k.device:
            raise DeviceError(f"k is on {k.device}, the layer's cache on {held.device}; move it")
    tensors, below = [x for _, x, _, _ in given], (math.inf, math.inf, TOO_LARGE)
    if checks_are_deferred():
        for x, limit in zip(tensors, below, strict=False):
            require_finite(x, lambda: NonFiniteError("not a number"), limit)
        return None
    sizes = largest(*tensors)
    for (name, *_), size, limit in zip(given, sizes, below, strict=False):
        if not size < limit:
            more = f", or {TOO_LARGE} and more" if name == "q" else ""
            raise NonFiniteError(f"{name} holds NaN or infinity{more}; nothing was stored")
    return sizes


def check_query(geometry: CacheGeometry, q: Tensor, config: AttendConfig) -> None:
    """Raise `GeometryError` unless query heads divide among KV heads and latents have a scale."""
    query_groups(q.shape[1], geometry.num_kv_heads, config)
    if not geometry.head_dim:
        raise GeometryError("a cache without keys makes them of its values: see Step.attend_made")
    if geometry.latent:
        check_latent_config(config)


def state_of(given: object) -> CacheState:
    """Return the state in a `Snapshot`; raise `DtypeError` for anything else."""
    if not isinstance(given, Snapshot):
        line = "cache.snapshot()" if hasattr(given, "snapshot") else "kvpact.Snapshot.load(path)"
        raise DtypeError(f"a Snapshot is wanted, not {type(given).__name__}; write: {line}")
    return given.state()


def check_fits(held: CacheState, geometry: CacheGeometry) -> None:
    """Raise `GeometryError` unless a cache of K and V alone has room for all of a state."""
    if held.records:
        layers = len({record.layer for record in held.records})
        raise GeometryError(
            f"the snapshot has windows or states of {layers} more layers of its model, which this "
            "cache can't hold; restore it into a CompressedCache"
        )
    if replace(held.geometry, dtype=None) != replace(geometry, dtype=None):
        raise GeometryError(f"the snapshot is of {held.geometry}, the cache of {geometry}")


def _check_tensor(name: str, x: Tensor, heads: int | None, dim: int) -> None:
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_meta or x.is_nested:
        check_dense(name, x)
    if x.dim() != 4:
        raise GeometryError(
            f"{name} has {x.dim()} dimensions; it should be [batch, heads, tokens, width]"
        )
    if heads is not None and x.shape[1] != heads:
        raise GeometryError(
            f"{name} has {x.shape[1]} heads, the cache {heads} KV heads; axes are [batch, heads, "
            "tokens, width]"
        )
    if x.shape[3] != dim:
        raise GeometryError(f"{name} has width {x.shape[3]}, the cache {dim}")
    if x.shape[0] == 0 or x.shape[2] == 0:
        raise GeometryError(f"{name} is empty: shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise DtypeError(f"{name} is {x.dtype}; fp32, fp16 and bf16 can be stored")


KeyOffsets = Mapping[int, KeyOffset]
"""Layer -> what is known of its keys by their positions."""


def check_offsets(offsets: KeyOffsets | None, geometry: CacheGeometry) -> dict[int, KeyOffset]:
    """Return the offsets by layer. Raises `DtypeError`, `GeometryError`, `LayerIndexError`."""
    if not isinstance(offsets, Mapping | None):
        raise DtypeError(f"key_offsets should be layer -> KeyOffset, not {offsets!r}")
    for layer, offset in (offsets or {}).items():
        check_layer(layer, geometry.num_layers)
        if not isinstance(offset, KeyOffset):
            raise DtypeError(f"the key offset of layer {layer} is no KeyOffset: {offset!r}")
        if geometry.latent:
            raise GeometryError("latents (MLA) have no key offsets: leave key_offsets out")
        offset.check_fits(geometry.num_kv_heads, geometry.head_dim)
    return dict(offsets or {})
