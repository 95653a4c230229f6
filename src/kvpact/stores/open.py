"""`open_store`: any store by its URL."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvpact.errors import StoreError
from kvpact.files import check_path
from kvpact.stores.background import BackgroundStore
from kvpact.stores.base import Store
from kvpact.stores.directory import DirectoryStore
from kvpact.stores.encrypted import EncryptedStore
from kvpact.stores.fsspec import FsspecStore
from kvpact.stores.memory import MemoryStore
from kvpact.stores.mooncake import MooncakeStore
from kvpact.stores.redis import RedisStore


def open_store(
    url: str | PathLike[str],
    *,
    secret: bytes | None = None,
    background: bool = False,
    **options: Any,
) -> Store:
    """Open a store.

    Parameters
    ----------
    url : str or path
        ``memory://``; a directory, as a path or ``file:///path``; ``redis://`` and ``rediss://``
        (also ``unix://``); ``mooncake://host:port``; any other URL goes to fsspec (``s3://bucket/folder``).
    secret : bytes, optional
        32 bytes: entries are encrypted with them, see `EncryptedStore`.
    background : bool
        Writes happen in a thread, see `BackgroundStore`.
    **options
        Of the store's class: ``max_bytes``, ``ttl``, ``password`` …

    Returns
    -------
    Store
        Close it, or use it in a ``with`` block.

    Raises
    ------
    KVPactError
        The URL can't be opened, or the store has no such option.
    """
    check_path(url)
    text = fspath(url)
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "memory" and rest:
        raise StoreError(f"{text}: a memory store has no name; use memory://")
    kind, *given = _kind_of(scheme if separator else "", text)
    store = kind(*given, **options)
    try:
        if secret is not None:
            store = EncryptedStore(store, secret)
        return BackgroundStore(store) if background else store
    except BaseException:
        store.close()
        raise


def _kind_of(scheme: str, text: str) -> tuple[Any, ...]:
    """Return the class of a store, and what it is made of."""
    if not scheme:
        return DirectoryStore, text
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{text}: a path begins after file://, with a third slash")
        return DirectoryStore, url2pathname(parts.path)
    if scheme in ("dir", "directory", "folder", "path"):
        raise StoreError(
            f"{text}: a folder is named by its path; write: open_store({text[len(scheme) + 3 :]!r})"
        )
    if scheme == "memory":
        return (MemoryStore,)
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore, text
    if scheme == "mooncake":
        return MooncakeStore, text
    return FsspecStore, text
