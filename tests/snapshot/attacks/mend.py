"""Make a changed file's checksums right again, as somebody who forges one would."""

import contextlib
import hashlib
import json

from kvpact.snapshot.container import _root
from kvpact.snapshot.header import dump_json

VALUES = [
    0, 1, 2, 3, 4, 31, 32, 33, 64, 67, 96, 2**31, 2**40, 2**62, -1, None, True, "", "F16", [], {},
]  # fmt: skip


def mended(data: bytes) -> bytes:
    """Return the file with checksums that are right, as far as there is a header to go by."""
    out = bytearray(data)
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RecursionError,
                             AttributeError, OverflowError):  # fmt: skip
        end = 8 + int.from_bytes(out[:8], "little")
        header = json.loads(bytes(out[8:end]))
        first, last = header["checksums"]["data_offsets"]
        runs = json.loads(header["__metadata__"]["manifest"])["sections"]
        sums, place = bytearray(), end + last
        for repeat, sizes in runs:
            for _ in range(min(repeat, 1000)):
                for size in sizes:
                    section = bytes(out[place : place + size])
                    sums += hashlib.blake2b(section, digest_size=16).digest()
                    place += size
        if first == 0 and len(sums) == last and end + last <= len(out):
            out[end : end + last] = sums
        at = 8 + len('{"__metadata__":{"blake2b":"')
        if at + 64 < end:
            out[at : at + 64] = _root(bytes(out[:end]), bytes(out[end : end + last])).encode()
    return bytes(out)


def edited(data: bytes, edits: bytes) -> bytes:
    """Return a file with values of its manifest and header replaced, the checksums right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    manifest = json.loads(header["__metadata__"]["manifest"])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for where, what in zip(edits[::2], edits[1::2], strict=False):
        places = list(_places({"manifest": manifest, "tensors": tensors}))[2:]
        holder, key = places[where % len(places)]
        holder[key] = VALUES[what % len(VALUES)]
    metadata = {**header["__metadata__"], "manifest": dump_json(manifest)}
    text = dump_json({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return mended(len(text).to_bytes(8, "little") + text + data[end:])


def _places(value: object):
    """Yield every place of nested lists and objects as its holder and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)
