"""`CompressedKV` as a file: a checked container (see `kvpact.snapshot`) with one section a tensor.

The manifest has the version of the slots, the spec and the shapes. All of it is checked against
what the spec's codecs say before anything is used.
"""

from __future__ import annotations

import math
import re
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.saved import check_stream, field_info
from kvpact.compressor.checks import DTYPES
from kvpact.compressor.compressed import CompressedKV
from kvpact.compressor.stream import PackedStream, room
from kvpact.errors import FormatError, KVPactError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.snapshot import Container, StreamState
from kvpact.spec import Spec

FORMAT = "kvpact.compressed_kv"
VERSION = 1
_NAME = re.compile(r"[kv]\.(open|(slots|state)\..+)")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no NaN


def _stream_entry(stream: PackedStream) -> dict[str, Any]:
    _, rows, _, dim = stream.open.shape
    return {
        "rows": rows,
        "dim": dim,
        "packed": stream.packed,
        "open": stream.open.shape[2],
        "energy": _finite(stream.energy),
        "lost": _finite(stream.lost),
    }


def container(compressed: CompressedKV) -> Container:
    """Return a container; equal contents give equal bytes."""
    tensors = list(compressed.tensors().items())
    manifest = {
        "slots": FORMAT_VERSION,
        "spec": compressed.spec.to_json(),
        "layout": compressed.layout,
        "batch": compressed.batch,
        "dtype": str(compressed.dtype).removeprefix("torch."),
        "k": _stream_entry(compressed.k),
        "v": _stream_entry(compressed.v),
    }
    runs = [(1, [tensor.nbytes for _, tensor in tensors])]
    return Container.build(FORMAT, VERSION, manifest, tensors, runs)


def save(compressed: CompressedKV, path: str | PathLike[str]) -> None:
    """Write a file, whole or not at all; equal contents give equal bytes.

    Parameters
    ----------
    compressed : CompressedKV
        What to write.
    path : path
        Where to; replaced if it is there.
    """
    container(compressed).save(path)


def load(path: str | PathLike[str]) -> CompressedKV:
    """Read what `save` wrote.

    Raises
    ------
    FormatError
        No such file format, an unknown version, a damaged file.
    IntegrityError
        A tensor's bytes were changed.
    SpecError
        It was made with a method that is not there.
    """
    file = Container.open(path, FORMAT, VERSION)
    manifest = file.manifest
    if manifest.get("slots") != FORMAT_VERSION:
        raise FormatError(
            f"{path} has slots of version {manifest.get('slots')!r}; this reads {FORMAT_VERSION}"
        )
    tensors: dict[str, Tensor] = {}
    for index in range(file.num_sections):
        tensors |= file.tensors(index)
    try:
        if len(tensors) != len(file.entries) - 1:
            raise FormatError("the sections are not the tensors")
        return _rebuild(manifest, tensors)
    except KVPactError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(f"{path}: the manifest is damaged: {error!r}") from error


def _rebuild(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> CompressedKV:
    strange = [name for name in tensors if not _NAME.fullmatch(name)]
    if strange:
        raise FormatError(f"unknown tensors: {', '.join(strange)}")
    spec, dtype = Spec.from_json(manifest["spec"]), _DTYPES[manifest["dtype"]]
    batch, layout = manifest["batch"], manifest["layout"]
    if layout not in ("batched", "unbatched") or type(batch) is not int or batch < 1:
        raise FormatError(f"layout {layout!r} with batch {batch!r} is not known")
    streams = []
    for side in ("k", "v"):
        entry = manifest[side]
        rows, dim = _number(entry, "rows", 1), _number(entry, "dim", 1)
        if rows % batch or rows != manifest["k"]["rows"]:
            raise FormatError(f"{rows} rows of {side!r} don't fit a batch of {batch}")
        make = spec.key.key_codec if side == "k" else spec.value.value_codec
        own = {
            name.removeprefix(f"{side}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{side}.")
        }
        streams.append(_stream(entry, make(dim, dtype), own, (rows, dim), dtype))
    if streams[0].length != streams[1].length:
        raise FormatError("K and V hold unlike numbers of tokens")
    return CompressedKV(spec, layout, batch, *streams)


def _number(entry: dict[str, Any], name: str, least: int) -> int:
    value = entry[name]
    if type(value) is not int or value < least:
        raise FormatError(f"{name}={value!r} should be a number from {least} on")
    return value


def _stream(
    entry: dict[str, Any],
    codec: Codec,
    tensors: dict[str, Tensor],
    size: tuple[int, int],
    dtype: torch.dtype,
) -> PackedStream:
    rows, dim = size
    packed, count = _number(entry, "packed", 0), _number(entry, "open", 0)
    energy, lost = (
        math.nan if entry[name] is None else float(entry[name]) for name in ("energy", "lost")
    )
    rest = tensors.pop("open", torch.zeros(1, rows, 0, dim, dtype=dtype))
    learnt = {name[6:]: x for name, x in tensors.items() if name.startswith("state.")}
    if isinstance(codec, FittedCodec):
        codec = codec.restore(learnt)
    elif learnt:
        raise FormatError("a codec that learns nothing has a state")
    slots = {name[6:]: x for name, x in tensors.items() if name.startswith("slots.")}
    fields = tuple(field_info(field) for field in codec.fields)
    if slots.keys() != {field.name for field in fields if packed}:
        raise FormatError("the slots are not those of the method")
    for field in fields if packed else ():
        shape = (1, rows, room(codec, packed) // field.tokens, *field.shape)
        _expect(field.name, slots[field.name], shape, field.dtype)
    _expect("open", rest, (1, rows, count, dim), dtype)
    held = StreamState(fields, slots, packed, packed, rest, None, codec.state())
    check_stream(codec, held)
    return PackedStream(codec, held, energy, lost)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise FormatError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, it should be {shape} {dtype}"
        )
