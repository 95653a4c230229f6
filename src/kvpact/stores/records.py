"""An entry's bytes as every store holds them: a header, a checksum, the key, the blob.

=======  ==  ================================================
0 … 7        magic ``kvpentry``
8 … 39       BLAKE2b-256 of everything after it
40, 41   u2  version, 1
42, 43   u2  length of the key
44 … 51  f8  when it was put, in seconds of the store's clock
52 … 59  u8  length of the blob
60 …         key, then blob
=======  ==  ================================================

Numbers are little-endian. Magic and checksum stay where they are in every version, so that an
entry of a later version is not taken for a damaged one: that is removed, the other left alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from kvpact.errors import FormatError, IntegrityError

MAGIC = b"kvpentry"
VERSION = 1
_DIGEST = 32
_START = len(MAGIC) + _DIGEST
_FIELDS = struct.Struct("<HHdQ")
HEADER = _START + _FIELDS.size
"""Bytes in front of the key."""
LONGEST_HEADER = HEADER + 200


@dataclass(frozen=True)
class RecordEntry:
    """The contents of a record: its key, when it was put, its blob."""

    key: str
    created: float
    blob: memoryview


def seal(key: str, blob: memoryview, created: float) -> tuple[bytes, memoryview]:
    """Return header and blob; one after the other they are the record. The blob is not copied."""
    name = key.encode()
    fields = _FIELDS.pack(VERSION, len(name), created, blob.nbytes) + name
    digest = blake2b(fields, digest_size=_DIGEST)
    digest.update(blob)
    return MAGIC + digest.digest() + fields, blob


def unseal(key: str, record: bytes, *, verify: bool = True) -> RecordEntry:
    """Check a record, but its checksum only to `verify`. Raises `IntegrityError`, `FormatError`."""
    view = memoryview(record)
    if verify:
        digest = blake2b(view[_START:], digest_size=_DIGEST).digest()
        if len(view) < HEADER or view[: len(MAGIC)] != MAGIC or view[len(MAGIC) : _START] != digest:
            raise IntegrityError(f"the entry of {key} was changed: its checksum does not match")
    name, created = peek(record, len(record))
    if name != key:
        raise IntegrityError(f"the entry of {key} is that of {name}")
    return RecordEntry(key, created, view[HEADER + len(name.encode()) :])


def peek(head: bytes, size: int) -> tuple[str, float]:
    """Return key and time out of a record's first `LONGEST_HEADER` bytes or more, unverified."""
    if len(head) < HEADER or head[: len(MAGIC)] != MAGIC:
        raise IntegrityError("no entry of a store")
    version, length, created, blob = _FIELDS.unpack_from(head, _START)
    if version != VERSION:
        raise FormatError(f"an entry of version {version}; this reads version {VERSION}")
    name = head[HEADER : HEADER + length]
    if len(name) != length or HEADER + length + blob != size:
        raise IntegrityError("an entry is cut short")
    try:
        return bytes(name).decode("ascii"), created
    except UnicodeDecodeError as error:
        raise IntegrityError("the key of an entry was changed") from error
