"""The contiguous cache: one batch of sequences that grow together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpact.attention.attend import query_groups
from kvpact.cache.checks import check_layer, check_tokens
from kvpact.cache.layer import CacheLayer
from kvpact.cache.stats import cache_stats
from kvpact.cache.step import Step
from kvpact.contract import AttendConfig, DequantResult, Fused
from kvpact.errors import CacheFull, DtypeError, GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.spec import Spec

_DEFAULT = AttendConfig()


class ContiguousCache:
    """A `CompressedKVCache` for one batch; rows have equal length, shorter ones padded on the left.

    Made by `kvpact.create_cache`. Calls for different layers may run in parallel; each layer has a
    lock of its own, and none is held while another is taken.

    Parameters
    ----------
    specs : list of Spec
        One per layer.
    geometry : CacheGeometry
        Shape of K and V.
    max_tokens : int, optional
        Refuse more tokens than that per layer (`CacheFull`).
    """

    layout = "contiguous"

    def __init__(
        self, specs: list[Spec], geometry: CacheGeometry, max_tokens: int | None = None
    ) -> None:
        self.geometry, self.max_tokens = geometry, max_tokens
        self.specs = list(specs)
        self._layers = [CacheLayer(spec) for spec in specs]

    def _layer(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig
    ) -> CacheLayer:
        """Return a layer, its lock taken, after all checks; the caller releases the lock."""
        check_layer(layer, len(self._layers))
        entry = self._layers[layer]
        entry.lock.acquire()
        try:
            check_tokens(self.geometry, k, v, q, entry.k.tail if entry.k is not None else None)
            if self.batch_size not in (None, k.shape[0]):
                raise GeometryError(f"batch {k.shape[0]}, but other layers hold {self.batch_size}")
            if q is not None:
                query_groups(q.shape[1], self.geometry.num_kv_heads, config)
            total = entry.length + k.shape[2]
            if self.max_tokens is not None and total > self.max_tokens:
                raise CacheFull(
                    f"layer {layer}: {total} tokens wanted, {self.max_tokens} allowed, "
                    f"{self.max_tokens - entry.length} free; truncate or raise max_tokens"
                )
            if config.padding is not None and config.padding.shape != k.shape[:1]:
                raise GeometryError(
                    f"padding has shape {tuple(config.padding.shape)}; it should be [{k.shape[0]}]"
                )
        except BaseException:
            entry.lock.release()
            raise
        return entry

    @torch.no_grad()
    def attend(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens and attend over all, for any number of queries.

        New tokens are attended exactly by themselves and by each other, the past as it is stored.
        K and V are never decompressed as a whole.

        Parameters
        ----------
        layer : int
            Layer index.
        k, v, q : Tensor
            `[B, H_kv, new, D]`, `[B, H_kv, new, D_v]`, `[B, H_q, new, D]`; fp32, fp16 or bf16.
        config : AttendConfig, optional
            Scale, masks, padding.

        Returns
        -------
        Tensor
            `[B, H_q, new, D_v]` in q's dtype.

        Raises
        ------
        KVPactError
            Wrong input (see `kvpact.errors`); the cache is as before.
        """
        config = config or _DEFAULT
        if not isinstance(q, Tensor):
            raise DtypeError(f"q should be a torch tensor, not {type(q).__name__}")
        entry = self._layer(layer, k, v, q, config)
        try:
            return entry.attend(k, v, q, config)
        finally:
            entry.lock.release()

    @torch.no_grad()
    def store(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        config: AttendConfig | None = None,
        q: Tensor | None = None,
    ) -> Step:
        """Store new tokens; return a `Step` that attends over them and the past, or decompresses.

        For engines that get K and V before the query. Parameters and errors as in `attend`; of
        `config` only `padding` and `exact_new` matter here, and `q`, if given, is only checked.
        """
        config = config or _DEFAULT
        entry = self._layer(layer, k, v, q, config)
        try:
            return entry.store(k, v, config)
        finally:
            entry.lock.release()

    def prefill(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        config: AttendConfig | None = None,
    ) -> DequantResult:
        """Store new tokens; return K and V of all tokens, decompressed when read.

        Parameters and errors as in `attend`; without `q` there is no `logit_bias`, K holds it all.
        """
        config = config or _DEFAULT
        return self.store(layer, k, v, config, q).dequantize(q, config)

    def decode(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Fused:
        """Store one token and attend over all; parameters and errors as in `attend`."""
        if isinstance(k, Tensor) and k.dim() == 4 and k.shape[2] != 1:
            raise GeometryError(f"decode takes one token, not {k.shape[2]}; use attend or prefill")
        return Fused(self.attend(layer, k, v, q, config))

    def dequantize(self, layer: int, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens held, decompressed: `[B, H_kv, T, D]`."""
        check_layer(layer, len(self._layers))
        return self._layers[layer].dequantize(side)

    def seq_len(self, layer: int = 0) -> int:
        """Tokens that a layer holds (padding included)."""
        check_layer(layer, len(self._layers))
        return self._layers[layer].length

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on in all layers; never extends.

        Inside the exact tail (the window, the open group) the cache is then as if those tokens had
        never come. Further back, a group that is cut keeps its packed tokens and its side
        information; the window refills with new tokens.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise GeometryError(f"truncate to a number of tokens from 0 on, not {length!r}")
        for layer in self._layers:
            layer.truncate(length)

    def reset(self, layer: int | None = None) -> None:
        """Forget all tokens, and the batch size, of one layer or (None) of all."""
        if layer is not None:
            check_layer(layer, len(self._layers))
        for entry in self._layers if layer is None else [self._layers[layer]]:
            entry.reset()

    def fork(self) -> ContiguousCache:
        """Return an independent copy; slots are shared until one side writes to them."""
        other = ContiguousCache(self.specs, self.geometry, self.max_tokens)
        other._layers = [layer.fork() for layer in self._layers]
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ContiguousCache:
        return self.fork()

    def select(self, indices: Tensor) -> None:
        """Keep the batch rows `indices` (`[N]` integers), in this order; rows may repeat."""
        batch = self.batch_size
        if (
            not isinstance(indices, Tensor)
            or indices.dim() != 1
            or indices.dtype not in (torch.int32, torch.int64)
        ):
            raise GeometryError("indices should be a 1-D tensor of integers")
        if batch is None:
            return
        if indices.numel() == 0 or indices.min() < 0 or indices.max() >= batch:
            raise GeometryError(f"indices should be one or more of 0 … {batch - 1}")
        for layer in self._layers:
            layer.select(indices)

    def reorder(self, indices: Tensor) -> None:
        """Rearrange the batch rows (beam search): `select` with as many rows as there are."""
        batch = self.batch_size
        if isinstance(indices, Tensor) and batch not in (None, indices.numel()):
            raise GeometryError(f"reorder takes {batch} indices, not {indices.numel()}")
        self.select(indices)

    def repeat(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times, next to each other."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise GeometryError(f"repeat takes a number from 1 on, not {repeats!r}")
        if self.batch_size is not None:
            self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int | None:
        """Rows of the batch; None while nothing is held."""
        # Read once: another thread may reset a layer in between.
        streams = [layer.k for layer in self._layers]
        return max((s.tail.shape[0] for s in streams if s is not None), default=None)

    def memory_usage(self) -> int:
        """Bytes of all tensors held: slots, side information, sinks, window, unused capacity."""
        return sum(t.numel() * t.element_size() for layer in self._layers for t in layer.tensors())

    def stats(self) -> dict[str, Any]:
        """Return what the cache holds, where its bytes go and what computes (see `cache.stats`)."""
        return cache_stats(self._layers, self.layout)
