"""Chunks of an engine's tokens as packed slots with a checksum; LMCache and SGLang share them."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.compressor import CompressedKV, KVCacheCompressor
from kvpact.errors import DtypeError, GeometryError, MismatchError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations import calibrated
from kvpact.integrations.calibrated import NOTHING, Learnt, learnt_of
from kvpact.methods.trellis_learning import TrellisKeyCodec
from kvpact.spec import Spec, parse_spec
from kvpact.stores.records import HEADER, seal, unseal

_NAME = 64  # characters of a record's key: a BLAKE2b-256 in hexadecimal
Shape = tuple[int, ...]


class Layout(Protocol):
    """The layout of K and V, `[L, H, T, D]`, in an engine's chunk."""

    @property
    def head_dim(self) -> int:
        """The width of K's heads."""

    @property
    def value_dim(self) -> int:
        """The width of V's heads."""

    def shapes(self, shape: Sequence[int]) -> tuple[Shape, Shape]:
        """Return the shapes of K and V in a chunk of that shape. Raises `GeometryError`."""

    def split(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V."""

    def join(self, k: Tensor, v: Tensor, chunk: Tensor) -> None:
        """Write K and V into a chunk."""


def digest_of(size: int, parts: Iterable[bytes]) -> str:
    """Return a BLAKE2b of so many bytes, in hexadecimal, of parts with their lengths in front."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


Where = TypeVar("Where", bound=Layout)


class ChunkFormat(Generic[Where]):
    """Conversion of chunks to bytes and back; every token is packed: no sinks and no window.

    A chunk is a record of kvpact's stores, with a checksum over everything and the hash of the key,
    around files of `CompressedKV`, whose batch are the chunk's layers. Of a `calibration`, a file
    or a model, each chunk has what its layers learnt, and one of another calibration is refused.
    """

    def __init__(self, spec: str | Spec, layout: Where, calibration: str | None = None) -> None:
        if isinstance(spec, str) and spec.strip().endswith((".toml", ".json")):
            raise SpecError(f"spec={spec!r}: a recipe by layer is not covered, name one spec")
        named = parse_spec(spec)
        self.spec = named.with_options(sinks=0, window=0)
        self.layout = layout
        self._compressor = KVCacheCompressor(self.spec, measure=False)
        self._sizes: dict[tuple[Shape, torch.dtype], int] = {}
        self._known: calibrated.Known | None = None
        if calibration is not None:
            self._known = calibrated.read(calibration, "calibration", [named])
        self._states: dict[tuple[Shape, torch.dtype], Learnt] = {}
        self._groups = self._checked_groups(str(named))

    def __str__(self) -> str:
        return f"{self.spec}, {self.layout}"

    def learnt_digest(self) -> str:
        """Return a digest of the calibration, "" where there is none."""
        if self._known is None:
            return ""
        return hashlib.blake2b(self._known.held.to_bytes()).hexdigest()

    def _checked_groups(self, text: str) -> list[tuple[str, int]]:
        """Return the tokens that K and V pack together."""
        widths = self.layout.head_dim, self.layout.value_dim
        codecs = self.spec.codecs(*widths, torch.float32)
        if self._known is not None and codecs[0].ready and not codecs[0].learns_from:
            raise SpecError(
                f"{self._known.name} is given, and K of {text!r} learns nothing: omit it"
            )
        for side, codec in zip("KV", codecs, strict=True):
            reason = ""
            learnt = self._known is not None and isinstance(codec, TrellisKeyCodec)
            if (codec.learns_from or not codec.ready) and not learnt:
                reason = "learns from its tokens, so its bytes are not known before"
            elif codec.joint or codec.rotation is not None or codec.has_bias:
                reason = "stores more than slots of one head"
            if reason:
                raise SpecError(
                    f"spec={text!r}: the method of {side} {reason}; take 'turboquant', "
                    "'int', 'fp8', 'kivi', 'kvarn', 'none' or "
                    "'trellis:center=0,first=false,weights=false,blocks=false', or "
                    "'trellis' with a calibration"
                )
        return [(side, codec.group) for side, codec in zip("KV", codecs, strict=True)]

    def nbytes(self, tensors: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
        """Return the bytes that a chunk takes, to the byte."""
        return HEADER + _NAME + sum(self._file_bytes(tuple(shape), kind) for shape, kind in tensors)

    def _file_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        size = self._sizes.get((shape, dtype))
        if size is None:
            k, v = self.layout.shapes(shape)
            if dtype not in DTYPES:
                raise DtypeError(
                    f"the engine's chunks are {dtype}; fp32, fp16 and bf16 can be packed: leave "
                    "its own cache in the model's dtype"
                )
            for side, group in self._groups:
                if k[2] % group:
                    raise GeometryError(
                        f"a chunk has {k[2]} tokens, and {str(self.spec)!r} packs {group} of "
                        f"{side} together: start LMCache with a --chunk-size, or SGLang with a "
                        "--page-size, that is a multiple"
                    )
            learnt = self._learnt(k, v, dtype)
            size = self._sizes[shape, dtype] = self._compressor.file_bytes(k, v, dtype, learnt)
        return size

    def _learnt(self, k: Shape, v: Shape, dtype: torch.dtype) -> Learnt:
        """Return what the codecs of K and V `[L, H, T, D]` learnt, all layers' heads in a row."""
        if self._known is None:
            return NOTHING
        layers, heads, _, width = k
        learnt = self._states.get((k, dtype))
        if learnt is None:
            geometry = CacheGeometry(layers, heads, width, v[3], dtype)
            every = (self.spec,) * layers
            try:
                each = learnt_of(self._known, range(layers), every, geometry, layers)
            except SpecError as error:
                raise SpecError(
                    f"{error}, or chunks hold a part of its heads or layers (tensor or pipeline "
                    "parallelism), which is not covered with a calibration"
                ) from error
            names = each[0][0]
            learnt = {name: torch.cat([one[0][name] for one in each]) for name in names}, {}
            self._states[k, dtype] = learnt
        return learnt

    def pack(self, tensors: Sequence[Tensor], name: str) -> bytes:
        """Return a chunk's bytes. Raises `GeometryError`, `DtypeError`, `NonFiniteError`."""
        files = []
        for x in tensors:
            size = self._file_bytes(tuple(x.shape), x.dtype)
            k, v = self.layout.split(x)
            learnt = self._learnt(tuple(k.shape), tuple(v.shape), x.dtype)
            data = self._compressor.compress_kv(k, v, learnt).to_bytes()
            assert len(data) == size, "the shapes don't decide the bytes"
            files.append(data)
        header, blob = seal(name, memoryview(b"".join(files)), time.time())
        return header + blob

    def unpack(self, data: bytes, name: str, out: Sequence[Tensor]) -> None:
        """Write what `pack` was given into a chunk's tensors, when every byte is checked."""
        # What can't be packed is no reason to call the bytes damaged.
        sizes = [self._file_bytes(tuple(x.shape), x.dtype) for x in out]
        files = self._files(unseal(name, data).blob, sizes)
        held = [self._read(part, x) for part, x in zip(files, out, strict=True)]
        for one, x in zip(held, out, strict=True):
            self.layout.join(*self._compressor.decompress_kv(one), x)

    def _files(self, blob: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        if sum(sizes) != len(blob):
            raise MismatchError(
                f"{len(blob):,} bytes of K and V where {str(self.spec)!r} has {sum(sizes):,}: they "
                "are of another spec or model; give each its own place"
            )
        ends = zip(accumulate(sizes), sizes, strict=True)
        return [blob[end - size : end] for end, size in ends]

    def _read(self, data: memoryview, x: Tensor) -> CompressedKV:
        k, v = wanted = self.layout.shapes(x.shape)
        held = CompressedKV.from_bytes(data)
        found = (held.spec, held.dtype, held.k_shape, held.v_shape)
        if found != (self.spec, x.dtype, *wanted):
            raise MismatchError(
                f"K and V of {str(held.spec)!r}, {held.dtype} {held.k_shape} and {held.v_shape}, "
                f"where {str(self.spec)!r}, {x.dtype} {k} and {v} is wanted"
            )
        state, learnt = held.k.codec.state(), self._learnt(k, v, x.dtype)[0]
        if any(not torch.equal(state[name], learnt[name]) for name in learnt):
            raise MismatchError("K and V were packed with another calibration")
        return held
