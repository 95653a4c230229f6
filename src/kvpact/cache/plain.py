"""`KVCache`: K and V of every token as they are, and what leaves and enters it, all checked."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES, check_layer
from kvpact.cache.memory import reserve
from kvpact.cache.stats import Summarized, Summary
from kvpact.errors import (
    CacheFull,
    DeviceError,
    DtypeError,
    FormatError,
    GeometryError,
    IncompleteToken,
    NonFiniteError,
)
from kvpact.geometry import check_count
from kvpact.quantizers.numbers import all_finite, cast
from kvpact.snapshot import Container
from kvpact.snapshot.header import SIZE, check

KIND, VERSION = "kvpact-plain-cache", 1
_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DType = torch.dtype | str
Rows = Tensor | np.ndarray[Any, Any]


@dataclass(frozen=True)
class KVSnapshot:
    """The tokens of a `KVCache` at one moment, as copies.

    Parameters
    ----------
    keys, values : sequence of Tensor or ndarray
        One per layer, `[seq_len, kv_dim]`.
    seq_len : int
        Tokens.
    """

    keys: Sequence[Rows]
    values: Sequence[Rows]
    seq_len: int


def known_dtype(dtype: Any) -> torch.dtype:
    """Return fp32, fp16 or bf16, given as torch's or numpy's dtype or by name."""
    if isinstance(dtype, str | type | np.dtype):
        with suppress(TypeError):  # no dtype of numpy's
            dtype = _NAMES.get(dtype if isinstance(dtype, str) else np.dtype(dtype).name, dtype)
    if dtype not in DTYPES:
        raise DtypeError(f"dtype {dtype!r} can't be held; take float32, float16 or bfloat16")
    known: torch.dtype = dtype
    return known


def as_rows(name: str, given: Any, kv_dim: int, dtype: torch.dtype) -> Tensor:
    """Return `[kv_dim]` or `[n, kv_dim]` numbers as `[n, kv_dim]` in a cache's dtype, checked."""
    if isinstance(given, np.ndarray):
        if given.dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
            raise DtypeError(f"{name} is {given.dtype}; cast it to float32 or float16")
        given = torch.from_numpy(np.array(given, order="C"))
    if not isinstance(given, Tensor):
        raise DtypeError(f"{name} should be a torch tensor or a numpy array, not {type(given)!r}")
    if given.dtype not in DTYPES:
        raise DtypeError(f"{name} is {given.dtype}; fp32, fp16 and bf16 can be stored")
    if given.device.type != "cpu":
        raise DeviceError(f"{name} is on {given.device}; a KVCache lives on the CPU, move it")
    if given.dim() not in (1, 2) or given.shape[-1] != kv_dim:
        raise GeometryError(
            f"{name} has shape {tuple(given.shape)}; it should be [{kv_dim}] or [tokens, {kv_dim}]"
        )
    rows = given.detach().reshape(-1, kv_dim)
    if not all_finite(rows):
        raise NonFiniteError(f"{name} holds NaN or infinity; nothing was stored")
    return rows if rows.dtype == dtype else cast(rows, dtype, f"a number of {name}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_payload(snapshot: KVSnapshot, kv_dim: int, dtype: torch.dtype) -> bytes:
    """Return a snapshot as one checked safetensors buffer: a section per layer, K then V."""
    tensors, runs = [], []
    if snapshot.seq_len:
        for layer, pair in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
            rows = [as_rows(side, x, kv_dim, dtype) for side, x in zip("kv", pair, strict=True)]
            tensors += [(f"layer.{layer}.{side}", x) for side, x in zip("kv", rows, strict=True)]
        runs = [(len(snapshot.keys), [2 * snapshot.seq_len * kv_dim * dtype.itemsize])]
    manifest = {
        "dtype": _name(dtype),
        "kv_dim": kv_dim,
        "num_layers": len(snapshot.keys),
        "seq_len": snapshot.seq_len,
    }
    return Container.build(KIND, VERSION, manifest, tensors, runs).to_bytes()


def read_payload(payload: Any, num_layers: int, kv_dim: int, dtype: torch.dtype) -> KVSnapshot:
    """Read what `write_payload` gave, for a cache of this shape and dtype."""
    container = Container(payload, KIND, VERSION)
    tokens = _checked(container.manifest, num_layers, kv_dim, dtype)
    if container.num_sections != (num_layers if tokens else 0):
        raise FormatError(f"{container.num_sections} layers in a payload of {num_layers}")
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer in range(num_layers):
        tensors = container.tensors(layer) if tokens else {}
        for side, held in (("k", keys), ("v", values)):
            empty = None if tokens else torch.zeros(0, kv_dim, dtype=dtype, device="cpu")
            x = tensors.get(f"layer.{layer}.{side}", empty)
            if x is None or x.shape != (tokens, kv_dim) or x.dtype != dtype:
                raise FormatError(f"{side} of layer {layer} is not what the manifest says")
            held.append(x)
    return KVSnapshot(keys, values, tokens)


def _checked(manifest: Mapping[str, Any], num_layers: int, kv_dim: int, dtype: torch.dtype) -> int:
    """Return the tokens of a payload that fits."""
    sizes = dict.fromkeys(("num_layers", "kv_dim", "seq_len"), SIZE)
    check(manifest, {**sizes, "dtype": object, "sections": list}, "the payload")
    layers, width = manifest["num_layers"], manifest["kv_dim"]
    if (layers, width) != (num_layers, kv_dim):
        raise GeometryError(
            f"the payload has {layers} layers of width {width}, the cache {num_layers} of width "
            f"{kv_dim}"
        )
    if manifest["dtype"] != _name(dtype):
        held = str(manifest["dtype"])[:40]
        raise DtypeError(f"the payload holds {held}, the cache {_name(dtype)}")
    tokens: int = manifest["seq_len"]
    return tokens


class KVCache(Summarized):
    """A contiguous cache without compression, one token after the other: `[tokens, kv_dim]`.

    A token is stored layer by layer with `store_kv`, seen at once by the layer that stored it, and
    committed for all layers with `advance`.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    max_seq_len : int
        Tokens that there is room for.
    kv_dim : int
        Width of a token: KV heads times head_dim.
    dtype : torch.dtype or str
        fp32, fp16 or bf16: of what is held. Numbers given in another of the three are rounded.

    Raises
    ------
    GeometryError, DtypeError
        A size that is no number from 1 on, another dtype.
    CacheFull
        The system has no addresses left for `max_seq_len` tokens.

    Notes
    -----
    Addresses for all tokens are reserved at once, memory is claimed in pages of the system (mostly
    4 KB) as tokens are written. So K of a layer is one view, without a copy, however long it gets,
    and a view stays valid: it shows its tokens until `truncate` and new ones replace them. What
    `clear` and the restores replace lives on in views made before.

    Calls for different layers may run in parallel. `advance`, `truncate`, `clear` and the restores
    are for all layers: call them while no layer is being stored.
    """

    def __init__(
        self, num_layers: int, max_seq_len: int, kv_dim: int, dtype: DType = torch.float32
    ) -> None:
        sizes = {"num_layers": num_layers, "max_seq_len": max_seq_len, "kv_dim": kv_dim}
        for name, size in sizes.items():
            check_count(name, size, 1)
        self.num_layers, self.max_seq_len, self.kv_dim = num_layers, max_seq_len, kv_dim
        self.dtype = known_dtype(dtype)
        self._adopt(self._reserved(), 0)
        self._locks = [threading.Lock() for _ in range(num_layers)]

    def _reserved(self) -> Tensor:
        return reserve((self.num_layers, 2, self.max_seq_len, self.kv_dim), self.dtype)

    def _adopt(self, data: Tensor, tokens: int) -> None:
        self._data, self._seq_len = data, tokens
        self._flying = [0] * self.num_layers
        self._touched = [tokens] * self.num_layers

    @property
    def seq_len(self) -> int:
        """Tokens committed; those in flight don't count."""
        return self._seq_len

    def store_kv(self, layer: int, key: Rows, value: Rows) -> None:
        """Write tokens of a layer at the current position; they replace what is in flight there.

        Parameters
        ----------
        layer : int
            Layer index.
        key, value : Tensor or ndarray
            `[kv_dim]`, or `[n, kv_dim]` for n tokens at once; fp32, fp16 or bf16.

        Raises
        ------
        CacheFull
            No room for all of them; nothing is written.
        KVPactError
            Another layer, shape, dtype or device; NaN or infinity. The cache is as before.
        """
        check_layer(layer, self.num_layers)
        k = as_rows("key", key, self.kv_dim, self.dtype)
        v = as_rows("value", value, self.kv_dim, self.dtype)
        count = len(k)
        if count != len(v) or not count:
            raise GeometryError(f"{count} keys and {len(v)} values; give as many, at least one")
        with self._locks[layer]:
            begin = self._seq_len
            end = begin + count
            if end > self.max_seq_len:
                raise CacheFull(
                    f"{count} tokens wanted, {self.max_seq_len - begin} of {self.max_seq_len} "
                    "free; truncate, or make a longer cache"
                )
            if self._is_own(k) or self._is_own(v):
                k, v = k.clone(), v.clone()
            self._data[layer, 0, begin:end] = k
            self._data[layer, 1, begin:end] = v
            self._flying[layer] = count
            self._touched[layer] = max(self._touched[layer], end)

    def _is_own(self, rows: Tensor) -> bool:
        return rows.untyped_storage().data_ptr() == self._data.untyped_storage().data_ptr()

    def advance(self, tokens: int = 1) -> None:
        """Commit tokens in flight, for all layers.

        Raises
        ------
        IncompleteToken
            A layer has not stored them; nothing is committed.
        """
        check_count("tokens", tokens, 1)
        missing = [layer for layer, flying in enumerate(self._flying) if flying < tokens]
        if missing:
            raise IncompleteToken(
                f"layer {missing[0]} has {self._flying[missing[0]]} of {tokens} tokens in flight; "
                "store_kv them in every layer, then advance"
            )
        self._seq_len += tokens
        self._flying = [flying - tokens for flying in self._flying]

    def get_keys(self, layer: int) -> Tensor:
        """Return the keys of a layer, `[tokens, kv_dim]`: those committed and those in flight.

        A view of the cache, not a copy: to be read, not to be written to.
        """
        return self._view(layer, 0)

    def get_values(self, layer: int) -> Tensor:
        """Return the values of a layer; see `get_keys`."""
        return self._view(layer, 1)

    def _view(self, layer: int, side: int) -> Tensor:
        check_layer(layer, self.num_layers)
        with self._locks[layer]:
            return self._data[layer, side, : self._seq_len + self._flying[layer]]

    def for_each_key(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (position, key) of a layer, `[kv_dim]` views, as `get_keys` shows them."""
        return enumerate(self.get_keys(layer).unbind())

    def for_each_value(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (position, value) of a layer; see `for_each_key`."""
        return enumerate(self.get_values(layer).unbind())

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, in flight or not; never extends, touches no data."""
        check_count("length", length)
        seq_len = min(self._seq_len, length)
        self._flying = [
            max(min(self._seq_len + flying, length) - seq_len, 0) for flying in self._flying
        ]
        self._seq_len = seq_len

    def clear(self) -> None:
        """Forget all tokens and give their memory back (once no view of it is left)."""
        self._adopt(self._reserved(), 0)

    def _summary(self) -> Summary:
        exact = 2 * self.num_layers * self.seq_len * self.kv_dim * self.dtype.itemsize
        return Summary("none", 1, self.seq_len, self.memory_usage(), exact)

    def memory_usage(self) -> int:
        """Bytes claimed: of all tokens ever written since `clear`, in whole pages of the system."""
        row, page = self.kv_dim * self.dtype.itemsize, mmap.PAGESIZE
        side, claimed, last = self.max_seq_len * row, 0, -1
        for layer, tokens in enumerate(self._touched):
            for start in (2 * layer * side, (2 * layer + 1) * side) if tokens else ():
                first = max(start // page, last + 1)
                last = (start + tokens * row - 1) // page
                claimed += max(last + 1 - first, 0) * page
        return claimed

    def snapshot(self) -> KVSnapshot:
        """Return copies of the tokens committed."""
        sides = [
            [self._data[layer, side, : self._seq_len].clone() for layer in range(self.num_layers)]
            for side in (0, 1)
        ]
        return KVSnapshot(tuple(sides[0]), tuple(sides[1]), self._seq_len)

    def restore_from_snapshot(self, snapshot: KVSnapshot) -> None:
        """Hold the tokens of a snapshot, and no others.

        Raises
        ------
        GeometryError
            Another number of layers, another width, or not `seq_len` tokens in every layer.
        CacheFull
            More tokens than there is room for.
        DtypeError, NonFiniteError
            What can't be stored. After any error the cache is as before.
        """
        tokens, layers = snapshot.seq_len, self.num_layers
        check_count("seq_len", tokens)
        if (len(snapshot.keys), len(snapshot.values)) != (layers, layers):
            raise GeometryError(
                f"the snapshot has keys of {len(snapshot.keys)} layers and values of "
                f"{len(snapshot.values)}, the cache {layers}"
            )
        if tokens > self.max_seq_len:
            raise CacheFull(
                f"the snapshot has {tokens} tokens, there is room for {self.max_seq_len}"
            )
        data = self._reserved()
        for side, name, held in ((0, "keys", snapshot.keys), (1, "values", snapshot.values)):
            for layer, given in enumerate(held):
                rows = as_rows(f"{name} of layer {layer}", given, self.kv_dim, self.dtype)
                if len(rows) != tokens:
                    raise GeometryError(
                        f"{name} of layer {layer} have {len(rows)} tokens, the snapshot {tokens}"
                    )
                data[layer, side, :tokens] = rows
        self._adopt(data, tokens)

    def to_payload(self) -> bytes:
        """Return the tokens committed as bytes: safetensors with a checksum over everything."""
        return write_payload(self.snapshot(), self.kv_dim, self.dtype)

    def restore_from_payload(self, payload: Any) -> None:
        """Hold the tokens of a payload, and no others.

        Raises
        ------
        FormatError, IntegrityError
            No payload of a `KVCache`, cut short, or changed in any bit.
        GeometryError, DtypeError, CacheFull
            That of a cache with other layers, width or dtype, or with more tokens than there is
            room for. After any error the cache is as before.
        """
        held = read_payload(payload, self.num_layers, self.kv_dim, self.dtype)
        self.restore_from_snapshot(held)
