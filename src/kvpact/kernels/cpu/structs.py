"""The structures and constants of ``abi.h``, which is read: the C interface is written once."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p, sizeof
from pathlib import Path
from typing import Any

_HEADER = re.sub(r"//.*", "", (Path(__file__).parent / "abi.h").read_text("utf-8"))
_NUMBERS = {
    name: int(number)
    for name, number in re.findall(r"\bKVP_(\w+)(?: =)? (\d+)\b", _HEADER)  # enums and #define
}
_TYPES: dict[str, Any] = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float}

ABI, MOST_DIM, MOST_GROUP = (_NUMBERS[name] for name in ("ABI", "MOST_DIM", "MOST_GROUP"))
F32, F16, BF16 = (_NUMBERS[name] for name in ("F32", "F16", "BF16"))
KINDS = {
    "table": _NUMBERS["TABLE"],
    "linear": _NUMBERS["LINEAR"],
    "raw": _NUMBERS["RAW"],
    "e4m3": _NUMBERS["E4M3"],
    "e5m2": _NUMBERS["E5M2"],
    "trellis": _NUMBERS["TRELLIS_CODES"],
}
ENCODINGS = {
    kind: _NUMBERS[kind.upper()]
    for kind in ("codebook", "symmetric", "affine", "channel", "float8", "balanced", "trellis")
}
CHOICES = {
    "ls": _NUMBERS["LEAST_SQUARES"],
    "l2": _NUMBERS["NORM"],
    "unbiased": _NUMBERS["UNBIASED"],
    "e4m3": 0,
    "e5m2": 1,
    "": 0,
}


def _members(body: str) -> Iterator[tuple[str, Any]]:
    """Yield name and ctypes' type of each member of a structure."""
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if "*" in declaration:
            yield declaration.rpartition("*")[2].strip(), c_void_p
            continue
        kind, names = declaration.split(maxsplit=1)
        for name in map(str.strip, names.split(",")):
            plain, _, count = name.rstrip("]").partition("[")
            yield plain, _TYPES[kind] * int(count) if count else _TYPES[kind]


def _of_c(name: str) -> Callable[[type[Structure]], type[Structure]]:
    """Give a class the members that a structure of this name has in C; a decorator."""
    found = re.search(rf"typedef struct \{{([^{{}}]*)\}} {name};", _HEADER)
    assert found is not None, f"abi.h has no {name}"

    def filled(cls: type[Structure]) -> type[Structure]:
        cls._fields_ = list(_members(found[1]))
        _TYPES[name] = cls
        return cls

    return filled


@_of_c("kvp_field")
class FieldStruct(Structure):
    """Storage of a field: a pointer per segment, strides in bytes."""


@_of_c("kvp_exact")
class ExactStruct(Structure):
    """Exact tokens, strides in bytes."""


@_of_c("kvp_offset")
class Offset(Structure):
    """What keys are stored without."""


@_of_c("kvp_block")
class Block(Structure):
    """Channels with a rotation and a trellis of their own."""


@_of_c("kvp_trellis")
class TrellisStruct(Structure):
    """What depends on the codec alone, of codes of a trellis."""


@_of_c("kvp_stream")
class StreamStruct(Structure):
    """K or V of one layer."""


@_of_c("kvp_attend_args")
class AttendArgs(Structure):
    """One call of attention."""


@_of_c("kvp_encode_args")
class EncodeArgs(Structure):
    """Tokens of one stream, and where they go."""


@_of_c("kvp_learn_args")
class LearnArgs(Structure):
    """A cache's first keys, and where goes what is learnt from them."""


@_of_c("kvp_decode_args")
class DecodeArgs(Structure):
    """Packed tokens of one stream, and where their numbers go."""


@_of_c("kvp_store")
class StoreStruct(Structure):
    """How K or V is stored."""


@_of_c("kvp_step_plan")
class StepStruct(Structure):
    """What stays from one step of a layer to the next."""


@_of_c("kvp_append")
class Append(Structure):
    """K or V of one step."""


@_of_c("kvp_step_args")
class StepArgs(Structure):
    """One step; `plan` is the address of a `StepStruct`."""


_CODES = {c_int32: "i", c_int64: "q", c_float: "f", c_void_p: "q"}


def _codes(structure: type[Structure], first: str = "") -> str:
    """Return the numbers of a structure, from the field `first` on, as `struct` names them."""
    fields: list[tuple[str, Any]] = list(structure._fields_)  # type: ignore[arg-type]
    start = [name for name, _ in fields].index(first) if first else 0
    return "".join(
        _codes(kind) if issubclass(kind, Structure) else _CODES[kind] for _, kind in fields[start:]
    )


FIXED_BYTES = StreamStruct.exact_from.offset
"""Bytes of a `StreamStruct` that stay the same while its slots stay where they are."""

_STREAM = f"{FIXED_BYTES}s{_codes(StreamStruct, 'exact_from')}"
CALL = struct.Struct("@" + 2 * _STREAM + _codes(AttendArgs, "batch"))
"""`AttendArgs` in one piece: of K and of V the fixed bytes, then every number behind them."""

STEP = struct.Struct("@" + _codes(StepArgs))
"""`StepArgs` in one piece."""

assert CALL.size == sizeof(AttendArgs), "padding inside of AttendArgs"
assert STEP.size == sizeof(StepArgs), "padding inside of StepArgs"
