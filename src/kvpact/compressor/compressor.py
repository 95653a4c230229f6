"""The compressor: any method, K and V in, packed slots out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, PagedKVCache
from kvpact.cache.stream.codecs import latent_spec
from kvpact.calibration.base import State
from kvpact.callable_package import told
from kvpact.compressor import caches
from kvpact.compressor.compressed import CompressedKV, Layout
from kvpact.compressor.stream import PackedStream, check_pair, flat
from kvpact.errors import DtypeError, FormatError, GeometryError, SpecError
from kvpact.kernels import Compute, choose
from kvpact.methods import Codec, Method
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.hybrid import Hybrid
from kvpact.spec import Spec, parse_spec


@told
class KVCacheCompressor:
    """Compresses K and V of a layer as a whole.

    Parameters
    ----------
    method : Method, Spec or str
        `LowRank`, `VectorQuantization`, `Hybrid` or any other method; a spec such as
        ``lowrank:rank=16`` or ``int:bits=8/vq``. Sinks and window don't apply: all tokens are
        packed, the last ones of an incomplete group are held exactly.
    quant_bits : {4, 8}
        Bits of a ``hybrid`` whose spec string names none.
    backend : {"auto", "cpu", "triton", "torch"}
        What encodes and decodes, as in `create_cache`; bytes and numbers are the same with each.
    measure : bool
        Whether to measure the error, for which everything is decompressed once; else it is NaN.

    Attributes
    ----------
    spec : Spec
        The methods for K and V.

    Raises
    ------
    SpecError
        No method, an option out of range, `quant_bits` other than 4 and 8.
    BackendUnavailable
        The backend asked for by name can't run here.
    """

    def __init__(
        self,
        method: Method | Spec | str,
        quant_bits: int = 8,
        backend: str = "auto",
        measure: bool = True,
    ) -> None:
        if type(quant_bits) is not int or quant_bits not in (4, 8):
            raise SpecError(f"quant_bits={quant_bits!r} should be one of 4, 8")
        self.quant_bits, self._compute, self._measure = quant_bits, choose(backend), measure
        if isinstance(method, Method):
            self.spec = Spec(method, method)
        elif isinstance(method, str):
            self.spec = self._with_default_bits(method)
        elif isinstance(method, Spec):
            self.spec = method
        else:
            raise SpecError(
                f"a method is a spec such as 'lowrank:rank=16' or a Method, not {method!r}"
            )
        self.method: Method | Spec = method if isinstance(method, Method) else self.spec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec}>"

    def _with_default_bits(self, text: str) -> Spec:
        spec = parse_spec(text)
        sides = text.split("/")
        methods = [
            replace(method, quant_bits=self.quant_bits)
            if isinstance(method, Hybrid) and "quant_bits" not in side
            else method
            for method, side in ((spec.key, sides[0]), (spec.value, sides[-1]))
        ]
        return Spec(methods[0], methods[1], spec.slashed)

    def stats(self) -> dict[str, Any]:
        """Return ``compute``: what ran and why, see `kvpact.kernels.Compute.stats`."""
        return {"compute": self._compute.stats()}

    def _own(self, compressed: CompressedKV) -> CompressedKV:
        """Return what somebody compressed, to be read with this compressor's backend."""
        if not isinstance(compressed, CompressedKV):
            raise DtypeError(f"a CompressedKV is wanted, not {type(compressed).__name__}")
        return compressed.with_compute(self._compute)

    def compress_kv(
        self, k: Tensor, v: Tensor, learnt: tuple[State, State] = ({}, {})
    ) -> CompressedKV:
        """Compress K and V.

        Parameters
        ----------
        k, v : Tensor
            `[B, H, T, D]` and `[B, H, T, D_v]`, fp32, fp16 or bf16.
        learnt : pair of mappings
            States (`Codec.state`) of the codecs of K and V, of `B * H` heads: these are taken
            instead of learning from the tokens.

        Raises
        ------
        GeometryError, DtypeError, DeviceError, NonFiniteError
            The tensors are empty, don't fit each other, or hold what the method can't.
        FormatError
            What was learnt is no state of the method's codecs for so many heads.
        """
        check_pair(k, v, 4)
        return self._compress(k, v, "batched", learnt)

    def compress_kv_3d(self, k: Tensor, v: Tensor) -> CompressedKV:
        """Compress K and V without a batch dimension, `[H, T, D]`; errors as of `compress_kv`."""
        check_pair(k, v, 3)
        return self._compress(k, v, "unbatched")

    def _compress(
        self, k: Tensor, v: Tensor, layout: Layout, learnt: tuple[State, State] = ({}, {})
    ) -> CompressedKV:
        packed = (
            PackedStream.of(codec, flat(x), self._compute, self._measure)
            for codec, x in zip(
                self._codecs(k.shape, v.shape, k.dtype, learnt), (k, v), strict=True
            )
        )
        return CompressedKV(self.spec, layout, k.shape[0] if k.dim() == 4 else 1, *packed)

    def _codecs(
        self, k: Sequence[int], v: Sequence[int], dtype: torch.dtype, learnt: tuple[State, State]
    ) -> list[Codec]:
        """Return the codecs for K and V of these shapes, with the states that are given."""
        made = []
        for codec, shape, state in zip(
            self.spec.codecs(k[-1], v[-1], dtype), (k, v), learnt, strict=True
        ):
            if state:
                if not isinstance(codec, FittedCodec):
                    raise FormatError(
                        f"{str(self.spec)!r} learns nothing that could be given to it"
                    )
                codec = codec.restore(state)
                codec.check_heads(prod(shape[:-2]))
            made.append(codec)
        return made

    def file_bytes(
        self,
        k_shape: tuple[int, ...],
        v_shape: tuple[int, ...],
        dtype: torch.dtype,
        learnt: tuple[State, State] = ({}, {}),
    ) -> int:
        """Return the bytes that a file of K and V of these shapes will have, header included.

        Shapes are `[B, H, T, D]` and `[B, H, T, D_v]`; `learnt` as of `compress_kv`. Raises
        `SpecError` where the tokens decide: the method learns from them, or the error is measured.
        """
        if self._measure:
            raise SpecError("a file's bytes depend on the error's digits: pass measure=False")
        key, value = self._codecs(k_shape, v_shape, dtype, learnt)
        k, v = self._blank(key, k_shape, dtype), self._blank(value, v_shape, dtype)
        return len(CompressedKV(self.spec, "batched", k_shape[0], k, v).to_bytes())

    @staticmethod
    def _blank(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> PackedStream:
        """Return the storage of tokens `[B, H, T, D]`, all zero, of a codec that learns nothing."""
        codec.require_fitted()
        batch, heads, tokens, dim = shape
        rest = torch.zeros(1, batch * heads, tokens % codec.group, dim, dtype=dtype, device="cpu")
        return PackedStream.restored(codec, tokens - rest.shape[2], rest, {}, Compute())

    def decompress_kv(self, compressed: CompressedKV) -> tuple[Tensor, Tensor]:
        """Return K and V `[B, H, T, D]`, whatever method compressed them.

        What had no batch dimension comes back as a batch of one. Raises `DtypeError` for what is
        no `CompressedKV`, as all methods that take one.
        """
        k, v = self._own(compressed).decompress()
        return (k, v) if k.dim() == 4 else (k.unsqueeze(0), v.unsqueeze(0))

    def decompress_kv_3d(self, compressed: CompressedKV) -> tuple[Tensor, Tensor]:
        """Return K and V `[H, T, D]`. Raises `GeometryError` for more than one row."""
        compressed = self._own(compressed)
        if compressed.batch > 1:
            raise GeometryError(f"a batch of {compressed.batch} rows; use decompress_kv")
        k, v = compressed.decompress()
        return (k, v) if k.dim() == 3 else (k.squeeze(0), v.squeeze(0))

    def compress_paged_cache(self, cache: PagedKVCache, layer: int, seq_id: int) -> CompressedKV:
        """Compress a sequence of a paged cache.

        Where the cache has the same method, the packed slots are copied as they are: nothing is
        quantised twice, and the error is not known (NaN). Else what the cache gives back is
        compressed, and the error is that of the second compression. The cache stays as it is.

        Raises
        ------
        LayerIndexError, SequenceError
            No such layer or sequence.
        GeometryError
            The sequence holds no tokens in this layer.
        """
        return caches.compress(cache, layer, seq_id, self.spec, self._compute)

    def decompress_to_paged_cache(
        self, compressed: CompressedKV, cache: PagedKVCache, layer: int, seq_id: int
    ) -> None:
        """Append to a sequence of a paged cache; all of it, or nothing.

        Where the cache has the same method and the sequence is empty in this layer, packed slots
        are copied as they are. Its sinks are then what the slots say of them.

        Raises
        ------
        LayerIndexError, SequenceError
            No such layer or sequence.
        GeometryError
            Heads or widths differ from the cache's, or there is more than one row.
        CacheFull
            The pool has too few pages.
        """
        caches.decompress(self._own(compressed), cache, layer, seq_id)

    def compress_mla_cache(
        self, cache: caches.AnyCache, layer: int, seq_id: int | None = None
    ) -> CompressedKV:
        """Compress the latents of a layer as they are; heads are never expanded.

        In the result K is `c_kv` and V `k_rope`. The compressor's spec is completed as a cache's
        is: `k_rope` gets 8-bit integers unless a method stands for it after the slash. Parameters
        and errors are those of `compress_paged_cache`; an `MLACache`, or another contiguous cache
        of latents, has no `seq_id`. `GeometryError` if the cache holds no latents.
        """
        _check_latent(cache)
        return caches.compress(cache, layer, seq_id, latent_spec(self.spec), self._compute)

    def decompress_to_mla_cache(
        self,
        compressed: CompressedKV,
        cache: caches.AnyCache,
        layer: int,
        seq_id: int | None = None,
    ) -> None:
        """Append latents to a layer, all of them or nothing; see `decompress_to_paged_cache`.

        A contiguous cache has no `seq_id`. `GeometryError` if the cache holds no latents.
        """
        _check_latent(cache)
        caches.decompress(self._own(compressed), cache, layer, seq_id)


def _check_latent(cache: ContiguousCache | PagedKVCache) -> None:
    if not isinstance(cache, ContiguousCache | PagedKVCache):
        raise DtypeError(f"an MLACache is wanted, not {type(cache).__name__}")
    if not cache.geometry.latent:
        raise GeometryError("the cache holds K and V of heads, no latents; use compress_kv")
