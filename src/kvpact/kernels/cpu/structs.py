"""The structures of ``native/kvpact.h``, in ctypes."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

ABI = 1

F32, F16, BF16 = 0, 1, 2
TABLE, LINEAR, RAW, E4M3, E5M2 = range(5)


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
        ("unused", c_int32),
        ("table", c_void_p),
        ("signs", c_void_p),
        ("segment_tokens", c_int64),
        ("codes", Field),
        ("scale", Field),
        ("zero", Field),
        ("fold", Field),
        ("shift", Field),
        ("exact_from", c_int64),
        ("tail", Exact),
        ("fresh", Exact),
        ("sinks", Exact),
        ("sink_positions", c_void_p),
        ("n_sinks", c_int64),
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
