"""The three methods of LMCache's serializers and deserializers, with counts.

LMCache takes whatever is raised here as a failure, and the engine computes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvpact.errors import GeometryError, IntegrityError, KVPactError, MismatchError
from kvpact.integrations.chunks import ChunkFormat, digest_of
from kvpact.integrations.lmcache.layout import ChunkLayout


def key_hash(key: Any) -> str:
    """Return the BLAKE2b-256 of an LMCache `ObjectKey`: every field, its length in front."""
    parts = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    return digest_of(32, parts)


logger = logging.getLogger(__name__)


class KVPactSerde:
    """Serializer and deserializer of LMCache, for any threads; `remove` drops what is damaged."""

    def __init__(self, chunks: ChunkFormat[ChunkLayout], remove: Callable[[Any], None]) -> None:
        self.chunks = chunks
        self._remove = remove
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refused: set[str] = set()

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: chunks, their bytes in the store, and before."""
        names = ("stored", "stored_bytes", "given_bytes", "not_stored")
        with self._lock:
            counts = {n: self._counts[n] for n in (*names, "loaded", "damaged", "mismatched")}
        return {"spec": str(self.chunks.spec), **counts}

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the bytes of a chunk; 1 if it can't be packed: LMCache holds locks here."""
        try:
            return self.chunks.nbytes(zip(layout_desc.shapes, layout_desc.dtypes, strict=True))
        except KVPactError as error:
            self._refuse(error)
            return 1

    def _refuse(self, error: KVPactError) -> None:
        with self._lock:
            known = str(error) in self._refused
            self._refused.add(str(error))
        if not known:
            logger.error("kvpact stores nothing of this engine: %s", error)

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Write a chunk's bytes into a buffer, and return how many. Raises `KVPactError`."""
        try:
            self.chunks.layout.check_model(key.model_name)
            data = self.chunks.pack(_tensors(src), key_hash(key))
        except KVPactError as error:
            self._count(not_stored=1)
            if isinstance(error, GeometryError):
                self._refuse(error)
            raise
        memoryview(dst.byte_array).cast("B")[: len(data)] = data
        self._count(stored=1, stored_bytes=len(data), given_bytes=src.get_size())
        return len(data)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Read a chunk, or raise; what can't be served is counted, logged and removed."""
        try:
            self.chunks.layout.check_model(key.model_name)
            self.chunks.unpack(bytes(src.byte_array), key_hash(key), _tensors(dst))
        except KVPactError as error:
            self._count(**{"damaged" if isinstance(error, IntegrityError) else "mismatched": 1})
            logger.warning(
                "kvpact: chunk %s of %s is computed again: %s",
                key.chunk_hash.hex(),
                key.model_name,
                error,
            )
            # What this process does not know, a later version or a method, may be good for others.
            if isinstance(error, IntegrityError | MismatchError):
                self._remove(key)
            raise
        self._count(loaded=1)


def _tensors(chunk: Any) -> list[Tensor]:
    return [chunk.get_tensor(index) for index in range(len(chunk.get_shapes()))]
