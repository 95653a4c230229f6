"""The state of a cache as plain data: what goes into a snapshot and comes out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.errors import FormatError, KVPactError
from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset
from kvpact.snapshot.header import DTYPE_NAMES, DTYPES

SIDES = ("k", "v")


@dataclass(frozen=True)
class FieldInfo:
    """One stored tensor of a stream, `[B, H, units, *shape]`; `tokens` that a unit covers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        given = {**vars(self), "dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape)}
        return dict(sorted(given.items()))


@dataclass(frozen=True)
class StreamState:
    """K or V of a layer.

    - `slots`: packed slots by field, `[B, H, units, *shape]`, as they lie in the cache; units of
      tokens from `packed` on are zero or not there.
    - `start`: where the exact `tail`, `[B, H, n, D]`, begins.
    - `offset`: what was taken off keys before they were encoded; `tail` and `sinks` are whole.
    - `origin`: each row's token at position 0 of the offset; None where it is the first.
    - `query_energy`: `[B, H, n, D]` uint8 (e5m2), of K whose codec is going to learn.
    """

    fields: tuple[FieldInfo, ...]
    slots: Mapping[str, Tensor]
    packed: int
    start: int
    tail: Tensor
    sinks: Tensor | None
    learnt: Mapping[str, Tensor]
    offset: KeyOffset | None = None
    origin: tuple[int, ...] | None = None
    query_energy: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.start + self.tail.shape[2]


@dataclass(frozen=True)
class LayerState:
    """One layer; without `streams` it holds nothing, not even a batch size; JSON-ready `spec`."""

    spec: dict[str, Any]
    streams: tuple[StreamState, StreamState] | None
    padding: tuple[int, ...] | None

    @property
    def length(self) -> int:
        """Tokens held."""
        return max((stream.length for stream in self.streams or ()), default=0)


@dataclass(frozen=True)
class RecordState:
    """A tensor that a layer holds besides compressed K and V: a window of them, or a state.

    `rows`: the axis of the batch; `tokens`: how many it stands at.
    """

    layer: int
    name: str
    tensor: Tensor
    rows: int
    tokens: int

    @property
    def key(self) -> str:
        """The name of its tensor in a file."""
        return f"record.{self.layer}.{self.name}"

    def to_json(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        about = {"dtype": DTYPE_NAMES[self.tensor.dtype], "shape": list(self.tensor.shape)}
        given = {name: value for name, value in vars(self).items() if name != "tensor"}
        return dict(sorted({**given, **about}.items()))


class CacheState(NamedTuple):
    """The state that caches restore, of whatever origin; layers may be there once, if asked."""

    geometry: CacheGeometry
    batch: int
    tokens: int
    layers: Iterable[LayerState]
    records: Sequence[RecordState] = ()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The origin of tokens: what K and V depend on besides the tokens and the cache's spec.

    Parameters
    ----------
    model : str, optional
        Fingerprint of config and weights, e.g. of `kvpact.integrations.fingerprint`.
    adapter : str, optional
        Name or fingerprint of the adapter (LoRA) in use.
    tenant : str, optional
        A salt that keeps tenants apart. It is stored as it is: give a hash of what is secret.
    """

    model: str | None = None
    adapter: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if value is not None and (not isinstance(value, str) or len(value) > 1000):
                raise FormatError(f"{name} should be text of at most 1,000 characters")

    def to_json(self) -> dict[str, str | None]:
        """Return JSON-ready data."""
        return {"adapter": self.adapter, "model": self.model, "tenant": self.tenant}


def geometry_json(geometry: CacheGeometry) -> dict[str, Any]:
    """Return all fields of a geometry as JSON-ready data."""
    given = {field.name: getattr(geometry, field.name) for field in fields(geometry)}
    dtype = {"dtype": None if geometry.dtype is None else DTYPE_NAMES[geometry.dtype]}
    return dict(sorted({**given, **dtype}.items()))


def geometry_from_json(data: Any) -> CacheGeometry:
    """Read what `geometry_json` gave; fields that came later take their defaults."""
    known = {field.name for field in fields(CacheGeometry)}
    if not isinstance(data, dict) or set(data) - known or not {"num_layers", "dtype"} <= set(data):
        raise FormatError("the geometry has other fields than this version knows")
    dtype = data["dtype"]
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise FormatError("the geometry's dtype is not known")
    if any(type(x) not in (int, bool, type(None)) for n, x in data.items() if n != "dtype"):
        raise FormatError("the geometry's fields should be numbers")
    try:
        return CacheGeometry(**{**data, "dtype": None if dtype is None else DTYPES[dtype]})
    except (KVPactError, TypeError) as error:
        raise FormatError(f"the geometry can't be right: {error}") from None
