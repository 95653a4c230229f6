"""What leaves and enters a `KVCache`: rows, snapshots, payloads, all checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.errors import DeviceError, DtypeError, FormatError, GeometryError, NonFiniteError
from kvpact.quantizers.numbers import all_finite, cast
from kvpact.snapshot import Container

KIND, VERSION = "kvpact-plain-cache", 1
_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DType = torch.dtype | str
Rows = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class KVSnapshot:
    """The tokens of a `KVCache` at one moment, as copies.

    Parameters
    ----------
    keys, values : sequence of Tensor or ndarray
        One per layer, `[seq_len, kv_dim]`.
    seq_len : int
        Tokens.
    """

    keys: Sequence[Rows]
    values: Sequence[Rows]
    seq_len: int


def known_dtype(dtype: Any) -> torch.dtype:
    """Return fp32, fp16 or bf16, given as torch's or numpy's dtype or by name."""
    if isinstance(dtype, str | type | np.dtype):
        with suppress(TypeError):  # no dtype of numpy's
            dtype = _NAMES.get(dtype if isinstance(dtype, str) else np.dtype(dtype).name, dtype)
    if dtype not in DTYPES:
        raise DtypeError(f"dtype {dtype!r} can't be held; take float32, float16 or bfloat16")
    known: torch.dtype = dtype
    return known


def as_rows(name: str, given: Any, kv_dim: int, dtype: torch.dtype) -> Tensor:
    """Return `[kv_dim]` or `[n, kv_dim]` numbers as `[n, kv_dim]` in a cache's dtype, checked."""
    if isinstance(given, np.ndarray):
        if given.dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
            raise DtypeError(f"{name} is {given.dtype}; cast it to float32 or float16")
        given = torch.from_numpy(np.array(given, order="C"))
    if not isinstance(given, Tensor):
        raise DtypeError(f"{name} should be a torch tensor or a numpy array, not {type(given)!r}")
    if given.dtype not in DTYPES:
        raise DtypeError(f"{name} is {given.dtype}; fp32, fp16 and bf16 can be stored")
    if given.device.type != "cpu":
        raise DeviceError(f"{name} is on {given.device}; a KVCache lives on the CPU, move it")
    if given.dim() not in (1, 2) or given.shape[-1] != kv_dim:
        raise GeometryError(
            f"{name} has shape {tuple(given.shape)}; it should be [{kv_dim}] or [tokens, {kv_dim}]"
        )
    rows = given.detach().reshape(-1, kv_dim)
    if not all_finite(rows):
        raise NonFiniteError(f"{name} holds NaN or infinity; nothing was stored")
    return rows if rows.dtype == dtype else cast(rows, dtype, f"a number of {name}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_payload(snapshot: KVSnapshot, kv_dim: int, dtype: torch.dtype) -> bytes:
    """Return a snapshot as one checked safetensors buffer: a section per layer, K then V."""
    tensors, runs = [], []
    if snapshot.seq_len:
        for layer, pair in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
            rows = [as_rows(side, x, kv_dim, dtype) for side, x in zip("kv", pair, strict=True)]
            tensors += [(f"layer.{layer}.{side}", x) for side, x in zip("kv", rows, strict=True)]
        runs = [(len(snapshot.keys), [2 * snapshot.seq_len * kv_dim * dtype.itemsize])]
    manifest = {
        "dtype": _name(dtype),
        "kv_dim": kv_dim,
        "num_layers": len(snapshot.keys),
        "seq_len": snapshot.seq_len,
    }
    return Container.build(KIND, VERSION, manifest, tensors, runs).to_bytes()


def read_payload(payload: Any, num_layers: int, kv_dim: int, dtype: torch.dtype) -> KVSnapshot:
    """Read what `write_payload` gave, for a cache of this shape and dtype."""
    container = Container(payload, KIND, VERSION)
    tokens = _checked(container.manifest, num_layers, kv_dim, dtype)
    if container.num_sections != (num_layers if tokens else 0):
        raise FormatError(f"{container.num_sections} layers in a payload of {num_layers}")
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(num_layers):
        tensors = container.tensors(layer) if tokens else {}
        for side, held in (("k", keys), ("v", values)):
            empty = None if tokens else torch.zeros(0, kv_dim, dtype=dtype, device="cpu")
            x = tensors.get(f"layer.{layer}.{side}", empty)
            if x is None or x.shape != (tokens, kv_dim) or x.dtype != dtype:
                raise FormatError(f"{side} of layer {layer} is not what the manifest says")
            held.append(x)
    return KVSnapshot(keys, values, tokens)


def _checked(manifest: Mapping[str, Any], num_layers: int, kv_dim: int, dtype: torch.dtype) -> int:
    """Return the tokens of a payload that fits."""
    good = set(manifest) == {"dtype", "kv_dim", "num_layers", "sections", "seq_len"}
    sizes = [manifest.get(name) for name in ("num_layers", "kv_dim", "seq_len")]
    if not good or any(type(n) is not int or n < 0 for n in sizes):
        raise FormatError("the payload's manifest is damaged")
    if sizes[:2] != [num_layers, kv_dim]:
        raise GeometryError(
            f"the payload has {sizes[0]} layers of width {sizes[1]}, the cache {num_layers} of "
            f"width {kv_dim}"
        )
    if manifest["dtype"] != _name(dtype):
        held = str(manifest["dtype"])[:40]
        raise DtypeError(f"the payload holds {held}, the cache {_name(dtype)}")
    tokens: int = manifest["seq_len"]
    return tokens
