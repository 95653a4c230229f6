"""What LMCache calls: the three methods of its serializers and deserializers, with counts.

LMCache takes whatever is raised here as a failure, and the engine computes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.compressor import CompressedKV, KVCacheCompressor
from kvpact.errors import (
    DtypeError,
    GeometryError,
    IntegrityError,
    KVPactError,
    MismatchError,
    SpecError,
)
from kvpact.integrations.lmcache.layout import ChunkLayout, Shape
from kvpact.spec import Spec, parse_spec
from kvpact.stores.records import HEADER, seal, unseal

_NAME = 64
"""Characters of a record's key: a BLAKE2b-256 in hexadecimal."""
Form = tuple[Sequence[int], torch.dtype]


def key_hash(key: Any) -> str:
    """Return the BLAKE2b-256 of an LMCache `ObjectKey`: every field, its length in front."""
    parts = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class ChunkFormat:
    """Makes chunks to bytes and back; every token is packed: `spec` has no sinks and no window.

    A chunk is a record of kvpact's stores, with a checksum over everything and the hash of the key,
    around files of `CompressedKV`, whose batch are the chunk's layers.
    """

    def __init__(self, spec: str | Spec, layout: ChunkLayout) -> None:
        if isinstance(spec, str) and spec.strip().endswith((".toml", ".json")):
            raise SpecError(f"spec={spec!r}: a recipe by layer is not covered, name one spec")
        named = parse_spec(spec)
        self.spec = named.with_options(sinks=0, window=0)
        self.layout = layout
        self._compressor = KVCacheCompressor(self.spec, measure=False)
        self._sizes: dict[tuple[Shape, torch.dtype], int] = {}
        self._groups = self._checked_groups(str(named))

    def __str__(self) -> str:
        pages = "" if self.layout.pages is None else f", pages of {self.layout.pages.tokens} tokens"
        widths = f"{self.layout.head_dim} and {self.layout.value_dim}"
        return f"{self.spec}, heads of width {widths}{pages}"

    def _checked_groups(self, text: str) -> list[tuple[str, int]]:
        """Return the tokens that K and V pack together."""
        widths = self.layout.head_dim, self.layout.value_dim
        codecs = self.spec.codecs(*widths, torch.float32)
        for side, codec in zip("KV", codecs, strict=True):
            reason = ""
            if codec.learns_from or not codec.ready:
                reason = "learns from its tokens, so its bytes are not known before"
            elif codec.joint or codec.rotation is not None or codec.has_bias:
                reason = "stores more than slots of one head"
            if reason:
                raise SpecError(
                    f"spec={text!r}: the method of {side} {reason}; take 'turboquant', "
                    "'int', 'fp8', 'kivi', 'kvarn', 'none' or "
                    "'trellis:center=0,first=false,weights=false,blocks=false'"
                )
        return [(side, codec.group) for side, codec in zip("KV", codecs, strict=True)]

    def nbytes(self, forms: Iterable[Form]) -> int:
        """Return the bytes that a chunk takes, to the byte."""
        return HEADER + _NAME + sum(self._file_bytes(tuple(shape), kind) for shape, kind in forms)

    def _file_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        size = self._sizes.get((shape, dtype))
        if size is None:
            k, v = self.layout.shapes(shape)
            if dtype not in DTYPES:
                raise DtypeError(
                    f"LMCache's chunks are {dtype}; fp32, fp16 and bf16 can be packed: leave the "
                    "engine's own cache in the model's dtype"
                )
            for side, group in self._groups:
                if k[2] % group:
                    raise GeometryError(
                        f"a chunk has {k[2]} tokens, and {str(self.spec)!r} packs {group} of "
                        f"{side} together: start LMCache with a --chunk-size that is a multiple"
                    )
            size = self._sizes[shape, dtype] = self._compressor.file_bytes(k, v, dtype)
        return size

    def pack(self, tensors: Sequence[Tensor], name: str) -> bytes:
        """Return a chunk's bytes. Raises `GeometryError`, `DtypeError`, `NonFiniteError`."""
        files = []
        for x in tensors:
            size = self._file_bytes(tuple(x.shape), x.dtype)
            data = self._compressor.compress_kv(*self.layout.split(x)).to_bytes()
            assert len(data) == size, "the shapes don't decide the bytes"
            files.append(data)
        header, blob = seal(name, memoryview(b"".join(files)), time.time())
        return header + blob

    def unpack(self, data: bytes, name: str, out: Sequence[Tensor]) -> None:
        """Write what `pack` was given into a chunk's tensors, when every byte is checked."""
        # What can't be packed is no reason to call the bytes damaged.
        sizes = [self._file_bytes(tuple(x.shape), x.dtype) for x in out]
        files = self._files(memoryview(unseal(name, data).blob), sizes)
        held = [self._read(part, x) for part, x in zip(files, out, strict=True)]
        for one, x in zip(held, out, strict=True):
            self.layout.join(*self._compressor.decompress_kv(one), x)

    def _files(self, blob: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
        if sum(sizes) != len(blob):
            raise MismatchError(
                f"{len(blob):,} bytes of K and V where {str(self.spec)!r} has {sum(sizes):,}: they "
                "are of another spec or model; give each its own place"
            )
        start = 0
        for size in sizes:
            yield blob[start : start + size]
            start += size

    def _read(self, data: memoryview, x: Tensor) -> CompressedKV:
        held, wanted = CompressedKV.from_bytes(data), self.layout.shapes(x.shape)
        found = (held.spec, held.dtype, held.k_shape, held.v_shape)
        if found != (self.spec, x.dtype, *wanted):
            raise MismatchError(
                f"K and V of {str(held.spec)!r}, {held.dtype} {held.k_shape} and {held.v_shape}, "
                f"where {str(self.spec)!r}, {x.dtype} {wanted[0]} and {wanted[1]} is wanted"
            )
        return held


logger = logging.getLogger(__name__)


class KVPactSerde:
    """Serializer and deserializer of LMCache, for any threads; `remove` drops what is damaged."""

    def __init__(self, chunks: ChunkFormat, remove: Callable[[Any], None]) -> None:
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
        """Read a chunk, or raise; what can't be served is counted, told and removed."""
        try:
            self.chunks.layout.check_model(key.model_name)
            self.chunks.unpack(bytes(src.byte_array), key_hash(key), _tensors(dst))
        except KVPactError as error:
            self._count(**{"damaged" if isinstance(error, IntegrityError) else "mismatched": 1})
            logger.warning(
                "kvpact: chunk %s of %s is computed anew: %s",
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
