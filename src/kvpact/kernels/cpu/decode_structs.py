"""The structure of ``native/decode.h``, in ctypes."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import ClassVar

from kvpact.kernels.cpu.structs import Stream


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
