"""The result of compressing: K and V of one layer, packed, with their bytes and their error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpact.callable_package import told
from kvpact.compressor import files
from kvpact.compressor.stream import PackedStream, check_pair, flat
from kvpact.errors import DeviceError, DtypeError, GeometryError
from kvpact.kernels import Compute
from kvpact.snapshot import Container
from kvpact.spec import Spec

Layout = Literal["batched", "unbatched"]


class KVError(NamedTuple):
    """Normalised errors `|x - y|^2 / |x|^2` of K and of V."""

    k: float
    v: float


@told
@dataclass(frozen=True)
class CompressedKV:
    """K and V, compressed. Made by `KVCacheCompressor` or `load`.

    Parameters
    ----------
    spec : Spec
        Methods for K and V; sinks and window mean nothing here.
    layout : {"batched", "unbatched"}
        Whether the tensors had a batch dimension.
    batch : int
        Rows; 1 where there is no batch dimension.
    k, v : PackedStream
        The packed tokens.
    """

    spec: Spec
    layout: Layout
    batch: int
    k: PackedStream
    v: PackedStream

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.k.stream.length

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what was compressed and of what comes back."""
        return self.k.stream.tail.dtype

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.k.stream.tail.device

    def _shape(self, stream: PackedStream) -> tuple[int, ...]:
        _, rows, _, dim = stream.stream.tail.shape
        shape = (self.batch, rows // self.batch, self.tokens, dim)
        return shape if self.layout == "batched" else shape[1:]

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of K as it was given, and as it comes back."""
        return self._shape(self.k)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of V."""
        return self._shape(self.v)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held, by name: slots, what codecs learnt, the open group."""
        return {
            f"{side}.{name}": tensor
            for side, stream in (("k", self.k), ("v", self.v))
            for name, tensor in stream.tensors().items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, factors, codebooks and the room for appends included."""
        return sum(x.nbytes for side in (self.k, self.v) for x in side.stream.tensors())

    @property
    def values(self) -> int:
        """Numbers of K and V that are held."""
        return prod(self.k_shape) + prod(self.v_shape)

    @property
    def bits_per_value(self) -> float:
        """All bits held per number of K and V."""
        return self.nbytes * 8 / self.values

    @property
    def error(self) -> KVError:
        """Normalised errors of K and of V, measured when the tokens were packed.

        NaN where they came from a cache that had packed them already, or where the compressor was
        set not to measure.
        """
        return KVError(self.k.error, self.v.error)

    def append(self, k: Tensor, v: Tensor, bound: float | None = None) -> CompressedKV:
        """Return a `CompressedKV` with more tokens; this one stays as it is.

        What was learnt from the first tokens stays. Only the basis of a low-rank method is
        extended, where it loses more of the new tokens' energy than `bound`.

        Parameters
        ----------
        k, v : Tensor
            As what was compressed, with any number of tokens.
        bound : float, optional
            Share of the new tokens' energy that a low-rank basis may lose; if omitted, twice what
            was lost of the first tokens and 0.001 more.

        Raises
        ------
        GeometryError, DtypeError, DeviceError, NonFiniteError
            The tensors don't fit each other or what is held.
        """
        check_pair(k, v, 4 if self.layout == "batched" else 3)
        if k.dtype != self.dtype:
            raise DtypeError(f"k is {k.dtype}, what is held {self.dtype}; cast it")
        if k.device != self.device:
            raise DeviceError(f"k is on {k.device}, what is held on {self.device}; move it")
        for name, x, held in (("k", k, self.k_shape), ("v", v, self.v_shape)):
            if (*x.shape[:-2], x.shape[-1]) != (*held[:-2], held[-1]):
                raise GeometryError(
                    f"{name} has shape {tuple(x.shape)}, what is held {held}; only the number of "
                    "tokens may differ"
                )
        if bound is not None and not 0 <= bound <= 1:
            raise GeometryError(f"bound is a share of the energy from 0 to 1, not {bound!r}")
        return replace(self, k=self.k.append(flat(k), bound), v=self.v.append(flat(v), bound))

    def with_compute(self, compute: Compute) -> CompressedKV:
        """Return the same, encoded and decoded by another backend from now on."""
        return replace(self, k=replace(self.k, compute=compute), v=replace(self.v, compute=compute))

    def decompress(self) -> tuple[Tensor, Tensor]:
        """Return K and V in the shapes and the dtype that were given."""
        k, v = self.k.decompress(), self.v.decompress()
        return k.reshape(self.k_shape), v.reshape(self.v_shape)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file with a manifest in its metadata; see `compressor.files`."""
        self._container().save(path)

    def to_bytes(self) -> bytes:
        """Return what `save` would write."""
        return self._container().to_bytes()

    def _container(self) -> Container:
        parts = self.spec, self.layout, self.batch, self.k, self.v
        return files.container(parts, self.tensors())

    @staticmethod
    def load(path: str | PathLike[str]) -> CompressedKV:
        """Read what `save` wrote; the tensors are on the CPU.

        Raises
        ------
        FormatError, IntegrityError
            No such file format, an unknown version, a damaged file, a tensor's bytes were changed.
        SpecError
            It was made with a method that is not there.
        """
        file = Container.open(path, files.FORMAT, files.VERSION)
        return CompressedKV(*files.read(file, str(path)))

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> CompressedKV:
        """Read what `to_bytes` gave; the tensors are on the CPU. Errors as of `load`."""
        file = Container(data, files.FORMAT, files.VERSION)
        return CompressedKV(*files.read(file, "the bytes"))
