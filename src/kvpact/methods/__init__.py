"""Published methods, one a file; `kvpact.registry` finds them by name."""

from kvpact.methods.base import Arrays, Codec, Method, bytes_per_slot, make_codec

__all__ = ["Arrays", "Codec", "Method", "bytes_per_slot", "make_codec"]
