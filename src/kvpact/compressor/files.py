"""`CompressedKV` as a file: safetensors, with a manifest of JSON in the metadata.

The manifest has a version, the spec, the shapes and a SHA-256 of every tensor. All of it is checked
against what the spec's codecs say before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from kvpact.compressor.checks import DTYPES
from kvpact.compressor.compressed import CompressedKV
from kvpact.compressor.stream import PackedStream
from kvpact.errors import FormatError, IntegrityError, KVPactError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import Spec

FORMAT = "kvpact.compressed_kv"
VERSION = 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


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


def save(compressed: CompressedKV, path: str | PathLike[str]) -> None:
    """Write a file, whole or not at all; equal contents give equal bytes.

    Parameters
    ----------
    compressed : CompressedKV
        What to write.
    path : path
        Where to; replaced if it is there.
    """
    tensors = {name: x.cpu().contiguous() for name, x in compressed.tensors().items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "slots": FORMAT_VERSION,
        "spec": compressed.spec.to_json(),
        "layout": compressed.layout,
        "batch": compressed.batch,
        "dtype": str(compressed.dtype).removeprefix("torch."),
        "k": _stream_entry(compressed.k),
        "v": _stream_entry(compressed.v),
        "sha256": {name: _digest(x) for name, x in tensors.items()},
    }
    # One entry: the order of several would differ from file to file.
    data = to_bytes(tensors, {"manifest": json.dumps(manifest, sort_keys=True, allow_nan=False)})
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("manifest", "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FormatError(f"{path} is no safetensors file, or damaged: {error}") from error
    try:
        manifest = json.loads(text)
        known = (manifest["format"], manifest["version"], manifest["slots"])
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} has no manifest of compressed K and V") from error
    if known != (FORMAT, VERSION, FORMAT_VERSION):
        raise FormatError(
            f"{path} is {known[0]!r} version {known[1]!r} with slots of version {known[2]!r}; this "
            f"reads {FORMAT!r} version {VERSION} with slots of version {FORMAT_VERSION}"
        )
    try:
        return _rebuild(manifest, tensors)
    except KVPactError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(f"{path}: the manifest is damaged: {error!r}") from error


def _rebuild(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> CompressedKV:
    digests = manifest["sha256"]
    if set(digests) != set(tensors):
        raise FormatError("the manifest names other tensors than the file has")
    for name, tensor in tensors.items():
        if _digest(tensor) != digests[name]:
            raise IntegrityError(f"tensor {name!r} was changed: its checksum does not match")
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
    state = {n.removeprefix("state."): t for n, t in tensors.items() if n.startswith("state.")}
    if isinstance(codec, FittedCodec):
        codec = codec.restore(state)
    elif state:
        raise FormatError("a codec that learns nothing has a state")
    packed, count = _number(entry, "packed", 0), _number(entry, "open", 0)
    energy, lost = (
        math.nan if entry[name] is None else float(entry[name]) for name in ("energy", "lost")
    )
    rest = tensors.get("open", torch.zeros(1, rows, 0, dim, dtype=dtype))
    _expect("open", rest, (1, rows, count, dim), dtype)
    stream = PackedStream(codec, {}, rest, packed, energy, lost)
    tokens, slots = -(-packed // stream.unit) * stream.unit, {}
    for field in codec.fields if packed else ():
        slots[field.name] = tensors[f"slots.{field.name}"]
        shape = (1, rows, tokens // field.tokens, *field.shape)
        _expect(field.name, slots[field.name], shape, field.dtype)
    named = {f"slots.{name}" for name in slots} | {f"state.{name}" for name in state} | {"open"}
    if set(tensors) - named:
        raise FormatError(f"unknown tensors: {', '.join(sorted(set(tensors) - named))}")
    return PackedStream(codec, slots, rest, packed, energy, lost)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise FormatError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype}, it should be {shape} {dtype}"
        )
