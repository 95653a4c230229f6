"""The contract between inference engines and KV-cache compression.

`CompressedKVCache` is the least that a cache has to do: five calls. `EngineCache`
(`cache/protocol.py`) adds those that engines make when the cache computes attention itself.
No model has to change for either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpact.errors import DeviceError, DtypeError, GeometryError, NonFiniteError

SMALLEST, LARGEST, LARGEST_CAP = 1e-30, 1e30, 1e8
"""Bounds of `AttendConfig`'s factors: fp32 holds them and their inverses with room to spare.
A larger softcap would cap nothing, and its tanh of tiny numbers would be lost to rounding."""
TOO_LARGE = 1e31
"""Queries, masks and logits of sinks stay below: of larger ones attention may make NaN."""
_LOGITS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_dense(name: str, x: object) -> None:
    """Raise `DtypeError` or `DeviceError` unless `x` is a tensor whose numbers lie in memory."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} should be a torch tensor, not {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise DtypeError(f"{name} is a {kind} tensor; make it dense, with to_dense() or padding")
    if x.is_meta:
        raise DeviceError(f"{name} is on the meta device and holds no numbers; move it")


@dataclass(frozen=True, kw_only=True)
class AttendConfig:
    """Options of an attention computation; keyword-only, so that fields can be added.

    Parameters
    ----------
    softmax_scale : float, optional
        Factor on the logits; `head_dim ** -0.5` if omitted.
    n_kv_groups : int, optional
        Query heads per KV head (`H_q / H_kv`); taken from the tensors if omitted, checked if given.
    softcap : float, optional
        Logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    sliding_window : int, optional
        A query sees itself and the `sliding_window - 1` tokens before it.
    sink_logits : Tensor, optional
        `[H_q]`; one more logit per head in the softmax' denominator (GPT-OSS).
    mask : Tensor, optional
        `[B or 1, H_q or 1, q_len, total]`: boolean (True may be seen) or additive. `total` counts
        the tokens held before the call plus the new ones.
    is_causal : bool
        New tokens see no later token. Set to False where `mask` says all.
    padding : Tensor, optional
        `[B]` integers: left-padding tokens of each row. They are never taken as sink tokens and
        never attended to.
    origin : Tensor, optional
        `[B]` integers: which token of each row stands at RoPE's position 0 (a negative one if the
        row begins later). Only caches with key offsets look at it, and only while a row holds no
        real token. If omitted, the first token that is no padding.
    exact_new : bool
        The tokens of this call are attended as given (True), or as they are stored (False: the
        harsher way of measuring a codec).
    sparse : bool
        `mask` lets few tokens through (an index chose them): attention may read these alone, which
        is quicker. The result is the same but for rounding.

    Raises
    ------
    DtypeError
        A field of another type; a tensor that is sparse or nested; numbers of another dtype than
        fp16, bf16, fp32 and fp64.
    DeviceError
        A tensor on the meta device.
    GeometryError
        A number out of range: `softmax_scale` is 0 or of a magnitude from 1e-30 to 1e30, `softcap`
        from 1e-30 to 1e8; windows, groups and padding are whole numbers.
    NonFiniteError
        NaN in a mask or in sinks, infinity, or 1e31 and more; minus infinity hides a token.
    """

    softmax_scale: float | None = None
    n_kv_groups: int | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    sink_logits: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = True
    padding: Tensor | None = None
    exact_new: bool = True
    origin: Tensor | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        for name in ("sink_logits", "mask", "padding", "origin"):
            if getattr(self, name) is not None:
                check_dense(name, getattr(self, name))
        for name in ("is_causal", "exact_new", "sparse"):
            if type(getattr(self, name)) is not bool:
                raise DtypeError(f"{name} should be True or False, not {getattr(self, name)!r}")
        for name in ("sliding_window", "n_kv_groups"):
            if getattr(self, name) is not None:
                self._set_whole(name)
        if self.softmax_scale is not None:
            self._set_real("softmax_scale")
            if self.softmax_scale and not SMALLEST <= abs(self.softmax_scale) <= LARGEST:
                raise GeometryError(
                    f"softmax_scale should be 0 or of a magnitude from {SMALLEST} to {LARGEST}, "
                    f"not {self.softmax_scale!r}"
                )
        if self.softcap is not None:
            self._set_real("softcap")
            if not SMALLEST <= self.softcap <= LARGEST_CAP:
                raise GeometryError(
                    f"softcap should be a number from {SMALLEST} to {LARGEST_CAP}, "
                    f"not {self.softcap!r}; None is no softcap"
                )
        if self.padding is not None and (
            self.padding.dtype not in (torch.int32, torch.int64) or (self.padding < 0).any()
        ):
            raise GeometryError("padding should be a tensor of whole numbers from 0 on")
        if self.origin is not None and self.origin.dtype not in (torch.int32, torch.int64):
            raise GeometryError(
                f"origin should be a tensor of whole numbers, not {self.origin.dtype}"
            )
        for name in ("sink_logits", "mask"):
            value = getattr(self, name)
            if value is None or (name == "mask" and not value.is_floating_point()):
                continue
            if value.dtype not in _LOGITS:
                raise DtypeError(f"{name} is {value.dtype}; cast it to fp32, fp16 or bf16")
            if value.numel() and not value.detach().amax().item() < TOO_LARGE:
                raise NonFiniteError(f"{name} holds NaN, or {TOO_LARGE} and more")

    def _set_whole(self, name: str) -> None:
        """Make a field an `int` of 64 bits, 1 or more."""
        value = getattr(self, name)
        try:
            if isinstance(value, bool | Tensor):
                raise TypeError
            whole = operator.index(value)
        except TypeError:
            raise DtypeError(f"{name} should be a whole number, not {value!r}") from None
        if not 1 <= whole < 1 << 63:
            raise GeometryError(f"{name} should be a number from 1 to 2**63 - 1, not {whole}")
        object.__setattr__(self, name, whole)

    def _set_real(self, name: str) -> None:
        """Make a field a `float`, out of a number or a tensor of one number."""
        value = getattr(self, name)
        scalar = isinstance(value, Tensor) and value.numel() == 1
        if isinstance(value, bool) or not (scalar or isinstance(value, Real)):
            raise DtypeError(f"{name} should be a number, not {value!r}")
        try:
            object.__setattr__(self, name, float(value))
        except OverflowError:
            raise GeometryError(f"{name} should be a number within fp32, not {value!r}") from None


_DEFAULT = AttendConfig()


def attend_config(config: AttendConfig | None) -> AttendConfig:
    """Return a call's config, the default one for None; raise `DtypeError` for anything else."""
    if config is None:
        return _DEFAULT
    if not isinstance(config, AttendConfig):
        raise DtypeError(f"config should be an AttendConfig, not {type(config).__name__}")
    return config


@dataclass(frozen=True)
class KVTile:
    """K and V of the tokens `start <= t < end`, decompressed: `[B, H_kv, end - start, D]` each."""

    start: int
    end: int
    k: Tensor
    v: Tensor
    logit_bias: Tensor | None


class DequantResult:
    """K and V of all tokens held, decompressed only when read.

    Parameters
    ----------
    tiles : callable
        `tiles()` iterates over tiles (`KVTile`) in the order of the tokens.
    total : int
        Tokens in all.
    has_bias : bool
        Whether the tiles carry a `logit_bias`.

    Notes
    -----
    The tokens of the call that made the result, sink tokens and window are exact; the rest is
    what the cache stores. `k`, `v` and `logit_bias` stay with the result once they were read, and
    can't be read for the first time after the cache was rolled back (`StaleResult`).
    """

    def __init__(
        self, tiles: Callable[[], Iterator[KVTile]], total: int, has_bias: bool = False
    ) -> None:
        self._tiles = tiles
        self.total = total
        self.has_bias = has_bias

    def tiles(self) -> Iterator[KVTile]:
        """Iterate over K and V in tiles, so that they never exist as a whole."""
        return self._tiles()

    @cached_property
    def _whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        tiles = list(self._tiles())
        bias = torch.cat([t.logit_bias for t in tiles], dim=-1) if self.has_bias else None  # type: ignore[misc]
        return torch.cat([t.k for t in tiles], dim=2), torch.cat([t.v for t in tiles], dim=2), bias

    @property
    def k(self) -> Tensor:
        """Keys, `[B, H_kv, total, D]`."""
        return self._whole[0]

    @property
    def v(self) -> Tensor:
        """Values, `[B, H_kv, total, D_v]`."""
        return self._whole[1]

    @property
    def logit_bias(self) -> Tensor | None:
        """`[B, H_q, q_len, total]`, added to the scaled logits before the softmax; or None."""
        return self._whole[2] if self.has_bias else None


@dataclass(frozen=True)
class Fused:
    """The cache computed the attention itself: `output` is `[B, H_q, q_len, D_v]`."""

    output: Tensor


@dataclass(frozen=True)
class Dequantized:
    """The caller computes the attention over `result`."""

    result: DequantResult


DecodeOutput = Fused | Dequantized


@runtime_checkable
class CompressedKVCache(Protocol):
    """The least that a compressed KV cache has to do; engines attend to what it returns.

    A cache that computes attention itself is an `EngineCache` (`kvpact.EngineCache`), which adds
    `attend`, `store`, `truncate`, `fork`, `stats` and `snapshot`.

    Notes
    -----
    Every layer holds the same number of rows B; K is `[B, H_kv, T, D]` and V `[B, H_kv, T, D_v]`,
    in one dtype (fp32, fp16 or bf16) and on one device per layer.

    Calls for different layers may run in parallel, calls for one layer take turns: the cache
    synchronises inside, with one lock per layer.

    **After a failure.** A call that raises has changed nothing. The layer holds the tokens, bytes
    and length that it held before, the other layers are untouched, and the next call works. Errors
    derive from `KVPactError` and say what to do.

    `kvpact.testing.CacheContract` checks all of this.
    """

    def prefill(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        config: AttendConfig | None = None,
    ) -> DequantResult:
        """Store new tokens; return K and V of all tokens, decompressed when they are read.

        Parameters
        ----------
        layer : int
            Layer index, from 0 on.
        k, v : Tensor
            `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`, the new tokens.
        q : Tensor, optional
            `[B, H_q, new, D]`, the queries of the new tokens. A cache whose keys are decompressed
            with a bias gives it as `logit_bias`, which depends on the queries; without `q` the
            keys contain everything and there is no `logit_bias`.
        config : AttendConfig, optional
            `padding`, and the scale of the `logit_bias`.

        Returns
        -------
        DequantResult
            K `[B, H_kv, total, D]` and V `[B, H_kv, total, D_v]`. The new tokens are as given.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        GeometryError
            Rank, heads, width, batch or number of tokens do not fit the cache or each other.
        DtypeError, DeviceError
            The tensors differ in dtype or device from each other or from the tokens held.
        NonFiniteError
            NaN, infinity, or numbers beyond what the method can store.
        CacheFull
            The cache has no room for all new tokens.
        """

    def decode(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> DecodeOutput:
        """Store one token per row; return the attention output, or what the caller needs for it.

        Parameters
        ----------
        layer, k, v, q, config
            As in `prefill`, with `new` = 1; `config` may hold all rules of the attention.

        Returns
        -------
        Fused or Dequantized
            The output `[B, H_q, 1, D_v]`; or K and V, over which the caller attends.

        Raises
        ------
        KVPactError
            As `prefill`; `GeometryError` also for more than one token.
        """

    def seq_len(self, layer: int) -> int:
        """Return the tokens that a layer holds, padding included. Raises `LayerIndexError`."""

    def reset(self, layer: int | None = None) -> None:
        """Forget all tokens of one layer, or of all layers (None).

        Raises
        ------
        LayerIndexError
            There is no such layer.
        GeometryError
            The layers share their memory (pages do) and can only be reset together.
        """

    def memory_usage(self) -> int:
        """Return the bytes of all tensors that the cache holds, unused capacity included."""
