"""Published methods, one a file; `kvpact.registry` finds them by name."""

from kvpact.methods.base import Codec, Method, bytes_per_slot

__all__ = ["Codec", "Method", "bytes_per_slot"]
