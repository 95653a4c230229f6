"""The contiguous cache: one batch of sequences that grow together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from kvpact.cache.batch.rows import BatchRows
from kvpact.cache.checks import (
    KeyOffsets,
    check_fits,
    check_layer,
    check_offsets,
    check_query,
    check_tokens,
    state_of,
)
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.let_go import Evictable
from kvpact.cache.layer.prompt import Prompt
from kvpact.cache.layer.quick import attend, quick_attend, quick_first
from kvpact.cache.layer.states import layer_state, page_tokens, restored_layer
from kvpact.cache.layer.stored import Step
from kvpact.cache.memory import room_for
from kvpact.cache.modes import detached
from kvpact.cache.stats import Summary, cache_stats
from kvpact.cache.stream.advance import MOST_STEP
from kvpact.cache.stream.codecs import Calibration, layer_codecs, states_of
from kvpact.callable_package import Figures
from kvpact.contract import AttendConfig, DequantResult, attend_config
from kvpact.errors import CacheFull, DtypeError, GeometryError
from kvpact.geometry import CacheGeometry, check_count
from kvpact.kernels import Compute, Hold, check_covered, giving_back
from kvpact.snapshot import Identity, RecordState, Snapshot
from kvpact.snapshot.state import CacheState, LayerState
from kvpact.spec import Spec

T = TypeVar("T")


class ContiguousCache(Evictable, BatchRows):
    """A `CompressedKVCache` for one batch; rows have equal length, shorter ones padded on the left.

    Made by `kvpact.create_cache`, whose parameters it has, but for `specs`, one per layer, and
    `compute`, what was asked to compute. Calls for different layers may run in parallel; each layer
    has a lock of its own, and none is held while another is taken.
    """

    layout = "contiguous"
    layer_type = CacheLayer

    @detached
    def __init__(
        self,
        specs: list[Spec],
        geometry: CacheGeometry,
        max_tokens: int | None = None,
        calibration: Calibration | None = None,
        compute: Compute | None = None,
        key_offsets: KeyOffsets | None = None,
    ) -> None:
        self.geometry, self.max_tokens = geometry, max_tokens
        self._specs = list(specs)
        self.compute, self.heap = compute or Compute(), Hold()
        self.compute.layers = Counter(specs)
        self.key_offsets = check_offsets(key_offsets, geometry)
        check_covered(self.compute, specs, geometry, bool(self.key_offsets))
        given = states_of(calibration, specs, geometry)
        codecs = layer_codecs(specs, geometry, given, self.key_offsets) if given else []
        self._layers = [
            self.layer_type(
                spec,
                codecs=codecs[i] if i in given else None,
                latent=geometry.latent,
                compute=self.compute,
                offset=self.key_offsets.get(i),
            )
            for i, spec in enumerate(specs)
        ]

    def _check(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig
    ) -> list[float] | None:
        """Do what `check_tokens` does for a layer, whose lock is held, and check its room."""
        held = self._layers[layer]._held.k
        sizes = check_tokens(self.geometry, k, v, q, held and held.memory.tensor)
        if held is None and self.batch_size not in (None, k.shape[0]):
            raise GeometryError(f"batch {k.shape[0]}, but other layers hold {self.batch_size}")
        if q is not None:
            check_query(self.geometry, q, config)
        total = k.shape[2] + (0 if held is None else held.length)
        if self.max_tokens is not None and total > self.max_tokens:
            raise CacheFull(
                f"layer {layer}: {total} tokens wanted, {self.max_tokens} allowed, "
                f"{self.max_tokens - total + k.shape[2]} free; truncate or raise max_tokens"
            )
        for name, rows in (("padding", config.padding), ("origin", config.origin)):
            if rows is not None and rows.shape != k.shape[:1]:
                raise GeometryError(
                    f"{name} has shape {tuple(rows.shape)}; it should be [{k.shape[0]}]"
                )
        return sizes

    @property
    def specs(self) -> list[Spec]:
        """The spec of each layer; see `BudgetCache`."""
        return self._specs

    def _make_room(self, layer: int, k: Tensor, *others: Any) -> None:
        """Prepare for a call, before a lock is taken; see `BudgetCache`."""

    def attend(
        self, layer: int, *, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens and attend over all, for any number of queries.

        Parameters, results and errors as in `EngineCache.attend`; tensors go by their names alone.
        Over MLA latents `k` is `c_kv`, `v` is `k_rope` and `q` the absorbed query (see `MLACache`).
        K and V are never decompressed as a whole.
        """
        if torch.is_inference_mode_enabled():
            return self._detached_attend(layer, k=k, v=v, q=q, config=config)
        if type(config) is not AttendConfig:
            config = attend_config(config)
        if type(layer) is int and 0 <= layer < len(self._layers):
            output = quick_attend(self._layers[layer], k, v, q, config, self.max_tokens)
            if output is not None:
                if self.heap.active or self.compute.prompts:
                    self._end_prompt()
                return output
            known = self.compute.repeats
            if known and (output := self._repeated(layer, k, v, q, config, known)) is not None:
                return output
        return self._attend(layer, k, v, q, config)

    _detached_attend = detached(attend)

    @detached
    def _attend(self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> Tensor:
        """Take the ordinary way."""
        if not isinstance(q, Tensor):
            raise DtypeError(f"q should be a torch tensor, not {type(q).__name__}")
        return self._checked(attend, layer, k, v, q, config)

    def _repeated(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, known: Prompt
    ) -> Tensor | None:
        """Attend with first tokens like the last layer's; None, nothing stored, for `_attend`."""
        entry, most = self._layers[layer], self.max_tokens
        if not known.fits(entry.spec, k, v, q, config) or (most is not None and k.shape[2] > most):
            return None
        with entry.lock:
            one_batch = self.batch_size == k.shape[0]
            self.heap.begin(k.shape[2], k.nbytes + v.nbytes, k.device, hold=False)
            return quick_first(entry, k, v, q, config, known) if one_batch else None

    @detached
    def store(
        self,
        layer: int,
        *,
        k: Tensor,
        v: Tensor,
        config: AttendConfig | None = None,
        q: Tensor | None = None,
    ) -> Step:
        """Store new tokens; return a `Step` that attends over them and the past, or decompresses.

        For engines that get K and V before the query. Parameters and errors as in `attend`; of
        `config` only `padding` and `exact_new` matter here; codecs that learn may learn from `q`.
        """
        return self._checked(CacheLayer.store, layer, k, v, q, attend_config(config))

    def _checked(self, call: Callable[..., T], layer: int, k: Tensor, v: Tensor, *others: Any) -> T:
        """Check new tokens, and let a layer store them by a call; `others`: queries, config."""
        check_layer(layer, len(self._layers))
        entry = self._layers[layer]
        self._make_room(layer, k, v, *others)
        with self.compute.checking(), entry.lock:
            sizes = self._check(layer, k, v, *others)
            if k.shape[2] <= MOST_STEP:
                self._end_prompt()
            self.heap.begin(k.shape[2], k.nbytes + v.nbytes, k.device, not self.compute.repeats)
            result = call(entry, k, v, *others, sizes)
            if self.compute.repeats:  # the other layers may need nothing new
                self.heap.early()
            self.heap.stored(layer + 1 == len(self._layers))
            return result

    def _end_prompt(self) -> None:
        if self.heap.active:
            self.heap.end()
        self.compute.end_prompt()

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
        config = attend_config(config)
        return self.store(layer, k=k, v=v, q=q, config=config).dequantize(q, config)

    def verify(self) -> None:
        """Raise `NonFiniteError` if a check that ``check="deferred"`` put off has failed."""
        for layer in self._layers:
            layer.verify()

    @detached
    def dequantize(self, layer: int, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens held, decompressed: `[B, H_kv, T, D]`."""
        check_layer(layer, len(self._layers))
        return self._layers[layer].dequantize(side)

    def entry(self, layer: int) -> CacheLayer:
        """Return a layer's streams, for code that moves packed slots."""
        check_layer(layer, len(self._layers))
        return self._layers[layer]

    def seq_len(self, layer: int = 0) -> int:
        """Tokens that a layer holds (padding included)."""
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            check_layer(layer, len(self._layers))
        k = self._layers[layer]._held.k  # models ask often: three calls less than `length`
        return 0 if k is None else k.length

    @detached
    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on in all layers; never extends.

        Inside the exact tail (the window and more) the cache is then as if those tokens had
        never come. Further back, a group that is cut keeps its packed tokens and its side
        information; the window refills with new tokens.
        """
        check_count("length", length)
        for layer in self._layers:
            layer.truncate(length)

    @detached
    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens in every layer that holds some.

        Steps of up to 8 tokens then allocate nothing until the room is used, so that an engine may
        capture them in a CUDA graph. The room counts as memory in use; a rollback gives it up.

        Parameters
        ----------
        tokens : int
            Not negative.

        Raises
        ------
        CacheFull
            More than `max_tokens` would be held, or there is no memory for them.
        GeometryError
            Not such a number.
        """
        check_count("tokens", tokens)
        longest = max((entry.length for entry in self._layers), default=0)
        if self.max_tokens is not None and longest + tokens > self.max_tokens:
            raise CacheFull(
                f"{tokens} more tokens do not fit: {longest} of {self.max_tokens} are held; "
                "reserve fewer, truncate or raise max_tokens"
            )
        wanted = Counter[torch.device]()
        for stream in (stream for layer in self._layers for stream in layer.streams()):
            like = stream.memory.tensor
            size = sum(field.bytes_per_token for field in stream.codec.fields)
            wanted[like.device] += like.shape[0] * like.shape[1] * int(size * tokens)
        with room_for(f"{tokens:,} more tokens", wanted):
            for layer in self._layers:
                layer.reserve(tokens)

    def reset(self, layer: int | None = None) -> None:
        """Forget all tokens, and the batch size, of one layer or (None) of all."""
        if layer is not None:
            check_layer(layer, len(self._layers))
        for entry in self._layers if layer is None else [self._layers[layer]]:
            entry.reset()

    @detached
    def snapshot(
        self,
        *,
        token_ids: Tensor | None = None,
        identity: Identity | None = None,
        page_size: int | None = None,
    ) -> Snapshot:
        """Return what the cache holds, as it lies there; the cache stays as it is.

        Parameters
        ----------
        token_ids : Tensor, optional
            `[T]` or `[B, T]` integers, stored with the tokens.
        identity : Identity, optional
            Model, adapter and tenant (`kvpact.snapshot.Identity`).
        page_size : int, optional
            Tokens per page of the snapshot, the smallest part that can be read alone: a multiple of
            32 and of the methods' groups; the least one from 64 on if omitted.
        """
        return self.snapshot_with((), token_ids, identity, page_size)

    @detached
    def snapshot_with(
        self,
        records: Sequence[RecordState],
        token_ids: Tensor | None = None,
        identity: Identity | None = None,
        page_size: int | None = None,
    ) -> Snapshot:
        """Return a snapshot that has what other layers of the model hold, too."""
        with giving_back():
            return Snapshot.build(
                map(layer_state, self._layers),
                geometry=self.geometry,
                layout=self.layout,
                page_size=page_tokens(self.specs, self.geometry, page_size),
                identity=identity,
                token_ids=token_ids,
                records=records,
            )

    @detached
    def restore(self, snapshot: Snapshot, *, device: torch.device | str | None = None) -> None:
        """Hold what a snapshot holds, instead of what is held now.

        Parameters and errors as in `EngineCache.restore`, whatever layout and row the snapshot is
        from (`Snapshot.select` chooses rows). `device`: where the tokens go; where the cache's are,
        or to the CPU, if omitted.
        """
        self.restore_state(state_of(snapshot), device)

    @detached
    def restore_state(self, held: CacheState, device: torch.device | str | None = None) -> None:
        """Restore a state; every layer is checked and built before any of them changes."""
        check_fits(held, self.geometry)
        if self.max_tokens is not None and held.tokens > self.max_tokens:
            raise CacheFull(f"{held.tokens} tokens, {self.max_tokens} allowed")
        if device is None:
            streams = [layer.k for layer in self._layers]
            device = next((s.tail.device for s in streams if s is not None), "cpu")
        built, where = list[CacheLayer](), torch.device(device)
        with giving_back():
            for index, state in enumerate(held.layers):
                place, dtype = self._place(index, held, state), self.geometry.dtype
                built.append(restored_layer(place, state, where, False, index, dtype))
                del state
            for layer, new in zip(self._layers, built, strict=True):
                layer.restore(new._held)

    def _place(self, index: int, held: CacheState, state: LayerState) -> CacheLayer:
        """Return an empty layer for a layer's state, before it is checked."""
        return self._layers[index].empty()

    @detached
    def fork(self) -> Self:
        """Return an independent copy; slots are shared until one side writes to them."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.heap, other._layers = Hold(), [layer.fork() for layer in self._layers]
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    @detached
    def _keep_rows(self, indices: Tensor) -> None:
        with giving_back(sum(x.nbytes for x in self._layers[0].tensors())):
            for layer in self._layers:
                layer.select(indices)

    @property
    def batch_size(self) -> int | None:
        """Rows of the batch; None while nothing is held."""
        for layer in self._layers:
            stream = layer._held.k  # read once: another thread may reset the layer
            if stream is not None:
                return stream.memory.tensor.shape[0]
        return None

    def memory_usage(self) -> int:
        """Bytes of all tensors held: slots, side information, sinks, window, unused capacity."""
        return sum(t.numel() * t.element_size() for layer in self._layers for t in layer.tensors())

    def _summary(self) -> Summary:
        return Summary.of(self.specs, self._layers, self.memory_usage())

    def stats(self) -> dict[str, Any]:
        """Return what the cache holds, where its bytes go and what computes (see `cache.stats`)."""
        return Figures(cache_stats(self._layers, self.layout, self.compute))
