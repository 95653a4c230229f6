"""The structures and constants of ``abi.h``, which is read: the C interface is written once."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any

_HEADER = re.sub(r"//.*", "", (Path(__file__).parent / "abi.h").read_text("utf-8"))
_NUMBERS = {
    name: int(number)
    for name, number in re.findall(r"\bKVP_(\w+)(?: =)? (\d+)\b", _HEADER)  # enums and #define
}
_TYPES: dict[str, Any] = {
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
}

ABI, MOST_DIM, MOST_GROUP = (_NUMBERS[name] for name in ("ABI", "MOST_DIM", "MOST_GROUP"))
F32, F16, BF16 = (_NUMBERS[name] for name in ("F32", "F16", "BF16"))
ENCODERS = {name.lower(): number for name, number in _NUMBERS.items()}
"""Kinds of encoding, and other names of the header."""
KINDS = {**ENCODERS, "trellis": _NUMBERS["TRELLIS_CODES"]}
CHOICES = {
    "ls": _NUMBERS["LEAST_SQUARES"],
    "l2": _NUMBERS["NORM"],
    "unbiased": _NUMBERS["UNBIASED"],
    "e5m2": 1,
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


for _body, _name in re.findall(r"typedef struct \{([^{}]*)\} (\w+);", _HEADER):
    _TYPES[_name] = type(_name, (Structure,), {"_fields_": list(_members(_body))})

FieldStruct, ExactStruct, Block = (_TYPES[f"kvp_{name}"] for name in ("field", "exact", "block"))
TrellisStruct, StreamStruct = _TYPES["kvp_trellis"], _TYPES["kvp_stream"]
AttendArgs, EncodeArgs, PromptArgs, DecodeArgs, StepArgs = (
    _TYPES[f"kvp_{name}_args"] for name in ("attend", "encode", "prompt", "decode", "step")
)
ScanArgs, GatherArgs = _TYPES["kvp_scan_args"], _TYPES["kvp_gather_args"]
PromptPlan = _TYPES["kvp_prompt_plan"]
StepStruct, Append = _TYPES["kvp_step_plan"], _TYPES["kvp_append"]

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    name: (
        _TYPES[result],
        [c_void_p if "*" in x else _TYPES[x.split()[0]] for x in arguments.split(",")]
        if arguments != "void"
        else [],
    )
    for result, name, arguments in re.findall(r"KVP_EXPORT (\w+) (\w+)\(([^)]*)\);", _HEADER)
}
"""Results and arguments of the library's functions, by name."""

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
"""`AttendArgs` in one piece: of K and of V the fixed bytes, then every number after them."""

STEP = struct.Struct("@" + _codes(StepArgs))
"""`StepArgs` in one piece."""
PROMPT = struct.Struct("@" + _codes(PromptArgs))
"""`PromptArgs` in one piece."""
TENSOR = struct.Struct("@" + _codes(_TYPES["kvp_tensor"]))
"""A `kvp_tensor` in one piece."""

assert CALL.size == sizeof(AttendArgs), "padding inside of AttendArgs"
assert STEP.size == sizeof(StepArgs), "padding inside of StepArgs"
