"""`EncryptedStore`: what another store holds, sealed. Needs ``kvpact[encryption]``."""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib import import_module
from typing import Any, Literal

from kvpact.errors import IntegrityError, StoreError
from kvpact.stores.base import (
    Blob,
    GCReport,
    Key,
    ManyStore,
    Progress,
    Store,
    StoreStats,
    StoreWarning,
    check_blob,
    check_key,
    optional,
)

MAGIC = b"kvpactE1"
_CIPHERS = {"aes-256-gcm": ("AESGCM", b"\x01"), "chacha20-poly1305": ("ChaCha20Poly1305", b"\x02")}
_NONCE = 12
_HEAD = len(MAGIC) + 1 + 8


class EncryptedStore(ManyStore):
    """Encrypts and authenticates blobs (AEAD); the entry's key is part of what is authenticated.

    So nobody who can write to the store can change an entry, or put one in another's place. Keys of
    entries, sizes and times stay readable. An entry that was forged is a miss, and removed; one
    that was sealed with another secret is a miss, and left alone. Every entry has a fresh random
    nonce: change the secret before 2^32 puts.

    Parameters
    ----------
    inner : Store
        Holds the entries; closed with this one.
    secret : bytes
        32 random bytes (``secrets.token_bytes(32)``), kept elsewhere.
    cipher : str
        ``aes-256-gcm``, or ``chacha20-poly1305`` for machines without AES instructions. Either
        reads what itself wrote.

    Raises
    ------
    BackendUnavailable
        cryptography is not installed.
    StoreError
        The secret has another length, or the cipher is unknown.
    """

    def __init__(
        self,
        inner: Store,
        secret: bytes,
        *,
        cipher: Literal["aes-256-gcm", "chacha20-poly1305"] = "aes-256-gcm",
    ) -> None:
        if not isinstance(secret, bytes) or len(secret) != 32:
            raise StoreError("the secret should be 32 random bytes: secrets.token_bytes(32)")
        if cipher not in _CIPHERS:
            raise StoreError(f"cipher={cipher!r}; known: {', '.join(_CIPHERS)}")
        self._inner = inner
        name, code = _CIPHERS[cipher]
        module = optional("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        self._cipher: Any = getattr(module, name)(secret)
        self._refused: type[Exception] = import_module("cryptography.exceptions").InvalidTag
        identity = blake2b(code, key=secret, digest_size=8, person=b"kvpact-store").digest()
        self._head = MAGIC + code + identity
        self._lock = threading.Lock()
        self._damaged = self._missed = 0

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r})"

    def put(self, key: Key, blob: Blob) -> None:
        """Seal and store a blob; see `Store.put`."""
        name, nonce = check_key(key), secrets.token_bytes(_NONCE)
        sealed = self._cipher.encrypt(nonce, check_blob(blob), self._head + name.encode())
        self._inner.put(name, b"".join((self._head, nonce, sealed)))

    def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return blobs, authenticated; see `Store.get_many`."""
        return self._blobs(keys, self._inner.get_many)

    def get_unverified(self, keys: Sequence[Key]) -> Sequence[Blob | None]:
        """Return blobs, authenticated all the same; see `Store.get_unverified`."""
        return self._blobs(keys, self._inner.get_unverified)

    def _blobs(self, keys: Sequence[Key], get: Callable[..., Any]) -> list[bytes | None]:
        names, blobs = [check_key(key) for key in keys], list[bytes | None]()
        sealed = list(get(names))[::-1]  # each goes when its blob is there
        for name in names:
            try:
                blobs.append(self._open(name, sealed.pop()))
            except IntegrityError as error:
                warnings.warn(str(error), StoreWarning, stacklevel=3)
                blobs.append(None)
        return blobs

    def fetch(self, key: Key) -> bytes | None:
        """Return a blob, authenticated; see `Store.fetch`."""
        return self._open(name := check_key(key), self._inner.fetch(name))

    def _open(self, name: str, sealed: Blob | None) -> bytes | None:
        if sealed is None:
            return None
        view = memoryview(sealed)
        nonce, rest = bytes(view[_HEAD : _HEAD + _NONCE]), view[_HEAD + _NONCE :]
        try:
            if view[:_HEAD] == self._head:
                blob: bytes = self._cipher.decrypt(nonce, rest, self._head + name.encode())
                return blob
        except (self._refused, ValueError) as error:
            with self._lock:
                self._damaged, self._missed = self._damaged + 1, self._missed + 1
            self._inner.delete(name)
            raise IntegrityError(
                f"{self!r}: {name} was forged: it fails its authentication; removed"
            ) from error
        with self._lock:
            self._missed += 1
        other = "with another secret or cipher" if view[: len(MAGIC)] == MAGIC else "not at all"
        warnings.warn(f"{self!r}: {name} was sealed {other}", StoreWarning, stacklevel=3)
        return None

    def contains_many(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether there is an entry; see `Store.contains_many`."""
        return self._inner.contains_many(keys)

    def delete(self, key: Key) -> bool:
        """Remove an entry; see `Store.delete`."""
        return self._inner.delete(key)

    def keys(self) -> Iterator[str]:
        """Iterate over the keys; see `Store.keys`."""
        return self._inner.keys()

    def stats(self) -> StoreStats:
        """Return the inner store's numbers, entries that failed here counted as misses."""
        stats = self._inner.stats()
        with self._lock:
            return replace(
                stats,
                hits=stats.hits - self._missed,
                misses=stats.misses + self._missed,
                damaged=stats.damaged + self._damaged,
            )

    def gc(self, *, verify: bool = False, progress: Progress | None = None) -> GCReport:
        """Collect in the inner store, which verifies its own checksums; see `Store.gc`."""
        return self._inner.gc(verify=verify, progress=progress)

    def flush(self) -> None:
        """Flush the inner store."""
        self._inner.flush()

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()
