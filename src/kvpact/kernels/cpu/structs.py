"""The structures of ``native/abi.h``, in ctypes."""

from __future__ import annotations

import struct
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p, sizeof
from typing import Any, ClassVar

ABI = 7
MOST_DIM, MOST_GROUP = 1024, 128
"""Channels of the widest vectors, and tokens of the largest group that is encoded together."""

F32, F16, BF16 = 0, 1, 2
TABLE, LINEAR, RAW, E4M3, E5M2, TRELLIS = range(6)
ENCODINGS = {
    "codebook": 0,
    "symmetric": 1,
    "affine": 2,
    "channel": 3,
    "float8": 4,
    "balanced": 5,
    "trellis": 6,
}
CHOICES = {"ls": 0, "l2": 1, "unbiased": 2, "e4m3": 0, "e5m2": 1, "": 0}


class Field(Structure):
    """Storage of a field: a pointer per segment, strides in bytes."""

    _fields_: ClassVar = [("base", c_void_p), ("row", c_int64), ("head", c_int64)]


class Exact(Structure):
    """Exact tokens, strides in bytes."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("row", c_int64),
        ("head", c_int64),
        ("token", c_int64),
    ]


class Offset(Structure):
    """What keys are stored without."""

    _fields_: ClassVar = [
        ("pairs", c_int64),
        ("channels", c_void_p),
        ("bias", c_void_p),
        ("table", c_void_p),
        ("length", c_int64),
        ("origin", c_void_p),
    ]


class Block(Structure):
    """Channels with a rotation and a trellis of their own."""

    _fields_: ClassVar = [
        ("dim", c_int32),
        ("bits", c_int32),
        ("memory", c_int32),
        ("unit", c_float),
        ("levels", c_void_p),
        ("signs", c_void_p),
        ("cells", c_void_p),
    ]


class Trellis(Structure):
    """What depends on the codec alone, of codes of a trellis."""

    _fields_: ClassVar = [
        ("blocks", c_int32),
        ("interleave", c_int32),
        ("block0", Block),
        ("block1", Block),
        ("block2", Block),
        ("weight", c_void_p),
        ("order", c_void_p),
        ("deviation", c_void_p),
        ("first", c_void_p),
        ("center", c_int32),
        ("unused", c_int32),
    ]


class Stream(Structure):
    """K or V of one layer."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("bits", c_int32),
        ("dim", c_int32),
        ("number", c_int32),
        ("group", c_int32),
        ("channels", c_int32),
        ("shift_scaled", c_int32),
        ("dtype", c_int32),
        ("middle", c_float),
        ("unit", c_float),
        ("treated", c_int32),
        ("unused", c_int32),
        ("table", c_void_p),
        ("signs", c_void_p),
        ("segment_tokens", c_int64),
        ("codes", Field),
        ("scale", Field),
        ("zero", Field),
        ("fold", Field),
        ("shift", Field),
        ("trellis", c_void_p),
        ("base", Field),
        ("mean", Field),
        ("step", Field),
        ("exact_from", c_int64),
        ("tail", Exact),
        ("fresh", Exact),
        ("sinks", Exact),
        ("sink_positions", c_void_p),
        ("n_sinks", c_int64),
        ("offset", Offset),
    ]


class AttendArgs(Structure):
    """One call of attention."""

    _fields_: ClassVar = [
        ("k", Stream),
        ("v", Stream),
        ("batch", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("queries", c_int64),
        ("held", c_int64),
        ("fresh", c_int64),
        ("first", c_int64),
        ("q", c_void_p),
        ("q_row", c_int64),
        ("q_head", c_int64),
        ("q_token", c_int64),
        ("out", c_void_p),
        ("q_dtype", c_int32),
        ("causal", c_int32),
        ("window", c_int64),
        ("padding", c_void_p),
        ("sink_logits", c_void_p),
        ("mask", c_void_p),
        ("mask_row", c_int64),
        ("mask_head", c_int64),
        ("mask_query", c_int64),
        ("mask_float", c_int32),
        ("fast", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int64),
    ]


class EncodeArgs(Structure):
    """Tokens of one stream, and where they go."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("bits", c_int32),
        ("dim", c_int32),
        ("by_channel", c_int32),
        ("choice", c_int32),
        ("dtype", c_int32),
        ("group", c_int32),
        ("channels", c_int32),
        ("signs", c_void_p),
        ("levels", c_void_p),
        ("steps", c_void_p),
        ("x", Exact),
        ("batch", c_int64),
        ("heads", c_int64),
        ("tokens", c_int64),
        ("start", c_int64),
        ("segment_tokens", c_int64),
        ("codes", Field),
        ("scale", Field),
        ("zero", Field),
        ("mean", Field),
        ("balance", Field),
        ("base", Field),
        ("step", Field),
        ("trellis", c_void_p),
        ("threads", c_int64),
    ]


class LearnArgs(Structure):
    """A cache's first keys, and where goes what is learnt from them."""

    _fields_: ClassVar = [
        ("dim", c_int32),
        ("dtype", c_int32),
        ("x", Exact),
        ("batch", c_int64),
        ("heads", c_int64),
        ("tokens", c_int64),
        ("trellis", c_void_p),
        ("padding", c_void_p),
        ("sinks", c_int64),
        ("query_energy", c_void_p),
        ("weighted", c_int32),
        ("sorted", c_int32),
        ("first", c_void_p),
        ("weight", c_void_p),
        ("order", c_void_p),
        ("deviation", c_void_p),
        ("threads", c_int64),
    ]


class DecodeArgs(Structure):
    """Packed tokens of one stream, and where their numbers go."""

    _fields_: ClassVar = [
        ("slots", Stream),
        ("by_channel", c_int32),
        ("dtype", c_int32),
        ("batch", c_int64),
        ("heads", c_int64),
        ("first", c_int64),
        ("last", c_int64),
        ("out", c_void_p),
        ("row", c_int64),
        ("head", c_int64),
        ("token", c_int64),
        ("threads", c_int64),
    ]


class Store(Structure):
    """How K or V is stored."""

    _fields_: ClassVar = [("form", EncodeArgs), ("limit", c_float), ("unused", c_int32)]


class StepPlan(Structure):
    """What stays from one step of a layer to the next."""

    _fields_: ClassVar = [
        ("attend", AttendArgs),
        ("k", Store),
        ("v", Store),
        ("kernel", c_int64),
    ]


class Append(Structure):
    """K or V of one step."""

    _fields_: ClassVar = [
        ("exact_from", c_int64),
        ("tail", Exact),
        ("fresh", c_void_p),
        ("spare", c_void_p),
        ("start", c_int64),
        ("tokens", c_int64),
        ("x", c_void_p),
    ]


class StepArgs(Structure):
    """One step; `plan` is the address of a `StepPlan`."""

    _fields_: ClassVar = [
        ("plan", c_void_p),
        ("k", Append),
        ("v", Append),
        ("q", c_void_p),
        ("out", c_void_p),
        ("held", c_int64),
        ("threads", c_int64),
    ]


_CODES = {c_int32: "i", c_int64: "q", c_float: "f", c_void_p: "q"}


def _codes(structure: type[Structure], first: str = "") -> str:
    """Return the numbers of a structure, from the field `first` on, as `struct` names them."""
    fields: list[tuple[str, Any]] = list(structure._fields_)  # type: ignore[arg-type]
    start = [name for name, _ in fields].index(first) if first else 0
    return "".join(
        _codes(kind) if issubclass(kind, Structure) else _CODES[kind] for _, kind in fields[start:]
    )


FIXED_BYTES = Stream.exact_from.offset
"""Bytes of a `Stream` that stay the same while its slots stay where they are."""

_STREAM = f"{FIXED_BYTES}s{_codes(Stream, 'exact_from')}"
CALL = struct.Struct("@" + 2 * _STREAM + _codes(AttendArgs, "batch"))
"""`AttendArgs` in one piece: of K and of V the fixed bytes, then every number behind them."""

STEP = struct.Struct("@" + _codes(StepArgs))
"""`StepArgs` in one piece."""

assert CALL.size == sizeof(AttendArgs), "padding inside of AttendArgs"
assert STEP.size == sizeof(StepArgs), "padding inside of StepArgs"
