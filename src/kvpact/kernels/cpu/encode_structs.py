"""The structures of ``native/encode.h``, in ctypes."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import ClassVar

from kvpact.kernels.cpu.structs import Exact, Field

KINDS = {
    "codebook": 0,
    "symmetric": 1,
    "affine": 2,
    "channel": 3,
    "float8": 4,
    "balanced": 5,
    "signs": 6,
    "polar": 7,
}
CHOICES = {"ls": 0, "l2": 1, "unbiased": 2, "e4m3": 0, "e5m2": 1, "": 0}


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
        ("angle_levels", c_int32),
        ("angles_by_channel", c_int32),
        ("sketch", c_void_p),
        ("sketches", c_int64),
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
        ("sketched", Field),
        ("residual", Field),
        *((f"angles{level}", Field) for level in range(1, 7)),
        ("threads", c_int64),
    ]
