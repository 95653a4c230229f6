"""Asking a store for many chunks: in few trips, and with few of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from kvpact.stores import Store
from kvpact.stores.base import Blob

FETCHED = 16
"""Chunks that are fetched at once, while as many are placed."""


class Gone(Exception):
    """The store gave nothing for the key of a checkpoint that it affirms."""

    def __init__(self, key: str, end: int) -> None:
        super().__init__(f"the checkpoint after token {end} is gone")
        self.key = key


def first_lacking(keys: Sequence[str], lack: Callable[[Sequence[str]], list[bool]]) -> int:
    """Return how many of the first keys are there; the more are, the more are asked for at once."""
    begin, end = 0, FETCHED
    while begin < len(keys):
        lacks = lack(keys[begin:end])
        if True in lacks:
            return begin + lacks.index(True)
        begin, end = end, 4 * end
    return len(keys)


def fetched_one(store: Store, key: str, *, verify: bool) -> Blob | None:
    """Return the blob under a key; without `verify` for who checks every byte of it."""
    return store.get(key) if verify else store.get_unverified([key])[0]


def fetched(store: Store, keys: Sequence[str]) -> Iterator[tuple[int, Blob | None]]:
    """Yield each key's number and blob, unverified; the last first, so the first are used last."""
    ends = range(len(keys), 0, -FETCHED)
    parts = [range(end - 1, max(end - FETCHED, 0) - 1, -1) for end in ends]

    def fetch(part: range) -> list[Blob | None]:
        return list(store.get_unverified([keys[index] for index in part]))

    with ThreadPoolExecutor(1, "kvpact-prefix") as pool:
        blobs = fetch(parts[0]) if parts else []
        for part, after in zip_longest(parts, parts[1:]):
            coming = None if after is None else pool.submit(fetch, after)
            blobs.reverse()
            for index in part:
                yield index, blobs.pop()
            blobs = [] if coming is None else coming.result()
