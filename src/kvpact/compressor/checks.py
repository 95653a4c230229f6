"""What may be compressed: every wrong input is named before anything happens."""

from __future__ import annotations

from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.contract import check_dense
from kvpact.errors import DeviceError, DtypeError, GeometryError, NonFiniteError
from kvpact.quantizers.numbers import all_finite

AXES = {3: "[heads, tokens, width]", 4: "[batch, heads, tokens, width]"}


def check_pair(k: Tensor, v: Tensor, dims: int) -> None:
    """Raise a named error unless K and V, of 3 or 4 `dims`, can be compressed together."""
    for name, x in (("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != dims:
            raise GeometryError(f"{name} has {x.dim()} dimensions; it should be {AXES[dims]}")
        if x.numel() == 0:
            raise GeometryError(f"{name} is empty: shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise DtypeError(f"{name} is {x.dtype}; fp32, fp16 and bf16 can be compressed")
    if k.shape[:-1] != v.shape[:-1]:
        raise GeometryError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; only the width may differ"
        )
    if k.dtype != v.dtype:
        raise DtypeError(f"k is {k.dtype} and v {v.dtype}; cast one of them")
    if k.device != v.device:
        raise DeviceError(f"k is on {k.device}, v on {v.device}; move one of them")
    for name, x in (("k", k), ("v", v)):
        if not all_finite(x):
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was compressed")
