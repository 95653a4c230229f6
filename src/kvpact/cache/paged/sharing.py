"""Full pages by the tokens in them and in all pages before: prefix sharing inside a pool."""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.errors import GeometryError

SinkPair = tuple[Tensor | None, Tensor | None]
Sinks = list[SinkPair]


@dataclass(frozen=True)
class SharedPage:
    """A page that new sequences may share, and the sink tokens of its sequence by layer."""

    page: int
    sinks: Sinks


def page_keys(token_ids: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """Return a key for each full page: a hash chain that begins with `salt`."""
    try:
        ids = [operator.index(token) for token in token_ids]
    except TypeError:
        raise GeometryError("token ids should be whole numbers") from None
    if any(not -(2**63) <= token < 2**63 for token in ids):
        raise GeometryError("token ids should fit into 64 bits")
    keys, last = [], salt
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        part = ids[start : start + page_size]
        digest = hashlib.blake2b(last, digest_size=32)
        digest.update(struct.pack(f"<{page_size}q", *part))
        last = digest.digest()
        keys.append(last)
    return keys


class PrefixTable:
    """Key of a page -> the page, for as long as somebody holds it unchanged."""

    def __init__(self) -> None:
        self._pages: dict[bytes, list[SharedPage]] = {}
        self._keys: dict[int, bytes] = {}

    def match(self, keys: Sequence[bytes]) -> list[SharedPage]:
        """Return the shared pages of the longest known prefix."""
        found = []
        for key in keys:
            if key not in self._pages:
                break
            found.append(self._pages[key][0])
        return found

    def add(self, key: bytes, shared: SharedPage) -> None:
        """Offer a page; of equal ones the first is shared, then the next that is still held."""
        if shared.page not in self._keys:
            self._keys[shared.page] = key  # first of all: `drop` finds what this says
            self._pages.setdefault(key, []).append(shared)

    def tensors(self) -> list[Tensor]:
        """Return the tensors held."""
        pairs = [pair for pages in self._pages.values() for page in pages for pair in page.sinks]
        return [sinks for pair in pairs for sinks in pair if sinks is not None]

    def drop(self, page: int) -> None:
        """Forget a page that was freed or is about to change."""
        key = self._keys.get(page)
        if key is None:
            return
        left = [shared for shared in self._pages.get(key, ()) if shared.page != page]
        if left:
            self._pages[key] = left
        else:
            self._pages.pop(key, None)
        self._keys.pop(page, None)  # last: a call that was interrupted is made again

    def drop_unheld(self, references: Sequence[int]) -> None:
        """Forget all pages that nobody holds."""
        for page in [page for page in self._keys if not references[page]]:
            self.drop(page)


def seal(layer: CacheLayer, tokens: int) -> None:
    """Pack up to `tokens` tokens, whole groups, the window's too, where slots may be written."""
    with layer.lock:
        if not layer.clean:
            layer.settle()
        held, made, clean = layer._held, [], layer.clean
        for stream in held.streams():
            end = stream.store.writable(min(tokens, stream.length), stream.packed)
            if stream.codec.ready and stream.packed < end:
                append = stream.sealed(end, held.padding)
                layer.clean = False
                stream = append.write()
            made.append(stream)
        if made:
            layer._held = held._replace(k=made[0], v=made[1], runner=None)
        layer.clean = clean
