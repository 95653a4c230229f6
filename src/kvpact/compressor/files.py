"""`CompressedKV` as bytes: a container with one section a tensor, all checked before it is used."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.cache.layer.states import check_stream, field_info
from kvpact.compressor.stream import PackedStream, room
from kvpact.errors import FormatError, IntegrityError, KVPactError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.kernels import Compute
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.snapshot import Container, StreamState
from kvpact.snapshot.header import COUNT, SIZE, check, need
from kvpact.spec import Spec

FORMAT = "kvpact.compressed_kv"
VERSION = 1
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_STREAM = {
    "rows": COUNT,
    "dim": COUNT,
    "packed": SIZE,
    "open": SIZE,
    "energy": (float | int,),
    "lost": (float | int,),
}
_MANIFEST = {
    "batch": COUNT,
    "dtype": frozenset(_DTYPES),
    "k": _STREAM,
    "layout": frozenset(("batched", "unbatched")),
    "sections": list,
    "slots": object,
    "spec": dict,
    "v": _STREAM,
}


def _stream_entry(stream: PackedStream) -> dict[str, Any]:
    _, rows, count, dim = stream.stream.tail.shape
    # JSON has no NaN.
    energy, lost = (x if math.isfinite(x) else None for x in (stream.energy, stream.lost))
    numbers = (rows, dim, stream.stream.packed, count, energy, lost)
    return dict(zip(_STREAM, numbers, strict=True))


Parts = tuple[Spec, Literal["batched", "unbatched"], int, PackedStream, PackedStream]
"""The parts of a `CompressedKV`: spec, layout, batch, K and V."""


def container(parts: Parts, tensors: dict[str, Tensor]) -> Container:
    """Return what is stored; equal contents give equal bytes."""
    spec, layout, batch, k, v = parts
    manifest = {
        "slots": FORMAT_VERSION,
        "spec": spec.to_json(),
        "layout": layout,
        "batch": batch,
        "dtype": str(k.stream.tail.dtype).removeprefix("torch."),
        "k": _stream_entry(k),
        "v": _stream_entry(v),
    }
    runs = [(1, [tensor.nbytes for tensor in tensors.values()])]
    return Container.build(FORMAT, VERSION, manifest, list(tensors.items()), runs)


def read(file: Container, name: str) -> Parts:
    """Read what lies in `file`, called `name`; errors as of `CompressedKV.load`."""
    manifest = file.manifest
    try:
        slots = manifest.get("slots")
        if slots != FORMAT_VERSION:
            raise FormatError(f"slots of version {slots!r}; this reads {FORMAT_VERSION}")
        check(manifest, _MANIFEST, "manifest")
        tensors = file.all_tensors()
        need(len(tensors) == len(file.entries) - 1, "the sections are not the tensors")
        return _rebuild(manifest, tensors)
    except (FormatError, IntegrityError) as error:
        raise type(error)(f"{name}: {error}") from error
    except KVPactError:
        raise
    except _DAMAGE as error:
        raise FormatError(f"{name}: the manifest is damaged: {error!r}") from error


def _rebuild(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Parts:
    spec, dtype = Spec.from_json(manifest["spec"]), _DTYPES[manifest["dtype"]]
    need(all(name[:2] in ("k.", "v.") for name in tensors), "unknown tensors")
    k, v = manifest["k"], manifest["v"]
    need(k["rows"] == v["rows"] and k["rows"] % manifest["batch"] == 0, "rows")
    need(k["packed"] + k["open"] == v["packed"] + v["open"], "K and V of unlike length")
    k_stream, v_stream = (
        _stream(
            manifest[side], codec, {n[2:]: x for n, x in tensors.items() if n[0] == side}, dtype
        )
        for side, codec in zip("kv", spec.codecs(k["dim"], v["dim"], dtype), strict=True)
    )
    return spec, manifest["layout"], manifest["batch"], k_stream, v_stream


def _stream(
    entry: dict[str, Any], codec: Codec, tensors: dict[str, Tensor], dtype: torch.dtype
) -> PackedStream:
    rows, dim, packed, count, *sums = (entry[name] for name in _STREAM)
    learnt, slots = (
        {name.removeprefix(kind): x for name, x in tensors.items() if name.startswith(kind)}
        for kind in ("state.", "slots.")
    )
    if isinstance(codec, FittedCodec):
        codec = codec.restore(learnt)
    wanted = {f"state.{name}": (tuple(x.shape), x.dtype) for name, x in codec.state().items()}
    for field in codec.fields if packed else ():
        shape = (1, rows, room(codec, packed) // field.tokens, *field.shape)
        wanted[f"slots.{field.name}"] = (shape, field.dtype)
    if count:
        wanted["open"] = ((1, rows, count, dim), dtype)
    found = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    need(found == wanted, f"the tensors are {found}, they should be {wanted}")
    rest = tensors.get("open", torch.zeros(1, rows, 0, dim, dtype=dtype, device="cpu"))
    fields = tuple(field_info(field) for field in codec.fields)
    held = StreamState(fields, slots, packed, packed, rest, None, codec.state())
    check_stream(codec, held, 0)
    packed_stream = PackedStream.restored(codec, packed, rest.clone(), slots, Compute())
    energy, lost = (math.nan if x is None else float(x) for x in sums)
    return replace(packed_stream, energy=energy, lost=lost)
