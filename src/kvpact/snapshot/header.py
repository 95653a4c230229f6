"""The header of a safetensors file, read strictly: one text for one meaning, checked before use.

What reads differently when it is written again is refused, so no byte of a header can change
unnoticed. Nothing is allocated that the size of the file does not bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch

from kvpact.errors import FormatError

MAX_HEADER = 1 << 20
"""Bytes that a header may have; those of a hundred layers are about 50,000."""
_MAX_RANK = 8
_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*", re.ASCII)
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: dtype, shape, and its bytes `begin <= i < end` after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dump_json(value: Any) -> str:
    """Return the one text of a JSON value: keys as they stand, no blanks, ASCII, no NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse_json(text: str | bytes, what: str) -> Any:
    """Read JSON that `dump_json` could have written. Raises `FormatError`."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number")

    try:
        text = text.decode("ascii") if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=refuse)
        again = dump_json(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} can't be read: {str(error)[:200]}") from None
    if again != text:
        raise FormatError(f"{what} is not written in the one way that it should be")
    return value


def header_bytes(metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> bytes:
    """Return a header, its length in front, padded so that tensors begin at a multiple of 8."""
    tensors = {
        name: {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in entries.items()
    }
    text = dump_json({"__metadata__": dict(sorted(metadata.items())), **tensors}).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(f"the header would have {len(text):,} bytes; {MAX_HEADER:,} are allowed")
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes, total: int) -> int:
    """Return the length of a header from the first 8 bytes of a file of `total` bytes."""
    if total < 8 or len(first) < 8:
        raise FormatError(f"{total} bytes are no safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > min(MAX_HEADER, total - 8) or length % 8:
        text = f"a header of {length:,} bytes in {total:,} can't be right"
        raise FormatError(f"{text}; this is no file of kvpact, or a damaged one")
    return length


def parse_header(text: bytes, room: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Return a header's metadata and tensors, which fill the `room` bytes after it, in order."""
    stripped = text.rstrip(b" ")
    if len(text) % 8 or len(text) - len(stripped) > 7:
        raise FormatError("the header's padding is wrong")
    value = parse_json(stripped, "the header")
    if not isinstance(value, dict) or next(iter(value), None) != "__metadata__":
        raise FormatError("the header has no metadata in front; this is no file of kvpact")
    metadata = value.pop("__metadata__")
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise FormatError("the header's metadata should be texts by key")
    if list(metadata) != sorted(metadata):
        raise FormatError("the header's metadata is not in order")
    entries, end = {}, 0
    for name, given in value.items():
        entries[name] = entry = _entry(name, given, end)
        end = entry.end
    if end != room:
        raise FormatError(f"tensors take {end:,} bytes, there are {room:,}")
    return metadata, entries


def _entry(name: str, given: Any, begin: int) -> TensorEntry:
    if len(name) > 200 or not _NAME.fullmatch(name):
        raise FormatError(f"{name[:50]!r} is no name of a tensor")
    if not isinstance(given, dict) or list(given) != ["dtype", "shape", "data_offsets"]:
        raise FormatError(f"tensor {name!r} should have dtype, shape and data_offsets")
    dtype = DTYPES.get(given["dtype"]) if isinstance(given["dtype"], str) else None
    if dtype is None:
        raise FormatError(f"tensor {name!r} has an unknown dtype")
    shape, offsets = given["shape"], given["data_offsets"]
    if not _numbers(shape) or len(shape) > _MAX_RANK:
        raise FormatError(f"tensor {name!r} has a shape that can't be right")
    if not _numbers(offsets) or len(offsets) != 2 or offsets[0] != begin:
        raise FormatError(f"tensor {name!r} does not begin where the one before ends")
    if offsets[1] - begin != prod(shape) * dtype.itemsize:
        raise FormatError(f"tensor {name!r} has other bytes than its shape needs")
    return TensorEntry(dtype, tuple(shape), begin, offsets[1])


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 62 for x in value)


def layout(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Return the entries of tensors that lie one after the other."""
    entries, begin = {}, 0
    for name, dtype, shape in tensors:
        if not _NAME.fullmatch(name) or len(name) > 200 or name in entries:
            raise FormatError(f"{name!r} can't be the name of a tensor in a file")
        if dtype not in DTYPE_NAMES:
            raise FormatError(f"tensors of {dtype} can't be saved")
        end = begin + prod(shape) * dtype.itemsize
        entries[name] = TensorEntry(dtype, tuple(shape), begin, end)
        begin = end
    return entries


SIZE = range(1 << 40)
ANY = range(-(1 << 40), 1 << 40)
COUNT = range(1, 1 << 40)


def need(good: bool, what: str) -> None:
    """Raise `FormatError` unless all is well."""
    if not good:
        raise FormatError(f"the manifest is damaged: {what}")


def check(value: Any, wanted: Any, what: str) -> None:
    """Raise `FormatError` unless a value is as wanted.

    Wanted is ``{key: wanted}`` (exactly these), ``[wanted]``, a range, pattern, set or type;
    ``(wanted,)`` where null will do, too.
    """
    if isinstance(wanted, dict):
        need(isinstance(value, dict) and value.keys() == wanted.keys(), what)
        for name, inner in wanted.items():
            check(value[name], inner, f"{what}.{name}")
    elif isinstance(wanted, list):
        need(isinstance(value, list), what)
        for index, item in enumerate(value):
            check(item, wanted[0], f"{what}[{index}]")
    elif isinstance(wanted, tuple):
        if value is not None:
            check(value, wanted[0], what)
    elif isinstance(wanted, range):
        need(type(value) is int and value in wanted, what)
    elif isinstance(wanted, re.Pattern):
        need(isinstance(value, str) and wanted.fullmatch(value) is not None, what)
    elif isinstance(wanted, frozenset):
        need(isinstance(value, str) and value in wanted, what)
    else:
        need(isinstance(value, wanted), what)
