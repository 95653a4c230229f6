"""Handles: what `update` returns in place of K and V.

A handle is a tensor with the right shape, dtype and device and no storage. kvpact's attention
function sees it and attends over the packed slots. Any other operation on it gets decompressed
K or V instead: right in every model, only slower, and said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, Step
from kvpact.cache.checks import DTYPES
from kvpact.contract import AttendConfig, DequantResult
from kvpact.errors import KVPactError


class FallbackWarning(UserWarning):
    """Something takes the slower way; the results are right."""


_said: set[str] = set()

_TAKES_HANDLES = ("kvpact", "sdpa", "eager", None)


def say_once(key: str, message: str) -> None:
    """Warn with a `FallbackWarning`, once per `key` and process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, FallbackWarning, stacklevel=3)


class NewTokens(Protocol):
    """The tokens of one `update`, on their way into a cache: what a handle stands for."""

    @property
    def fresh(self) -> bool:
        """Whether they are a cache's first latents, not yet stored: read as they are."""

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and these tokens."""

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens, decompressed, as `update` was given them."""


class FirstLatents(Protocol):
    """Latents that may be `fresh`."""

    k: Tensor

    @property
    def fresh(self) -> bool:
        """Whether they are a cache's first latents, not yet stored."""

    def settle(self, padding: Tensor | None) -> None:
        """Store them."""


class Pending:
    """The tokens of one `update`, stored when they are first used.

    The attention function knows the padding of each row and `update` does not; so storing waits
    for whichever comes first: attention, decompression, or the next call to the layer.

    Parameters
    ----------
    cache : ContiguousCache
        A cache of one layer.
    k, v : Tensor
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`.
    exact_new : bool
        As in `AttendConfig`.
    forget : callable
        Called once when the tokens are stored (or can't be): from then on only the handles, which
        live as long as the model's layer looks at them, keep the exact tokens.
    """

    def __init__(
        self,
        cache: ContiguousCache,
        k: Tensor,
        v: Tensor,
        exact_new: bool,
        forget: Callable[[], None],
    ) -> None:
        self._forget, self._dtypes = forget, (k.dtype, v.dtype)
        self.k, self.v = as_stored(k, v, cache.geometry.dtype)
        self._cache, self._exact_new = cache, exact_new
        self._latent = cache.geometry.latent
        self.waiting = True
        self._step: Step | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    def store(self, padding: Tensor | None = None) -> Step:
        """Store the tokens unless that was done; return what attention needs."""
        if self._step is None:
            config = AttendConfig(padding=padding, exact_new=self._exact_new)
            # Tokens that can't be stored are dropped with the error: the cache is as before them.
            self.waiting = False
            self._forget()
            self._step = self._cache.store(0, self.k, self.v, config)
        return self._step

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and these tokens."""
        return in_held_dtype(self.store(config.padding).attend, q, config)

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens, decompressed."""
        if self._parts is None:
            if self.fresh:
                return self.k.to(self._dtypes[0]) if side == "k" else self.v.to(self._dtypes[1])
            result = self.store().dequantize(None, AttendConfig())
            k, v = latent_parts(result, self.k) if self._latent else (result.k, result.v)
            self._parts = k.to(self._dtypes[0]), v.to(self._dtypes[1])
        return self._parts[0 if side == "k" else 1]

    @property
    def fresh(self) -> bool:
        """Whether these are the cache's first latents, not yet stored."""
        first = self.waiting and self._cache.seq_len() == 0
        return self._latent and self._exact_new and first

    def settle(self, padding: Tensor | None) -> None:
        """Store fresh latents; the model has read them already."""
        self.store(padding)


def latent_parts(result: DequantResult, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return `c_kv` and `k_rope` of a result over latents: its K is both side by side."""
    return result.v, result.k[..., latents.shape[-1] :]


def as_stored(k: Tensor, v: Tensor, held: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return K and V in one dtype that a cache holds.

    Under autocast RoPE makes K fp32 while V stays bf16: both become fp32. Numbers of float64 lose
    digits, which is said once. What `held` tokens are in a wider dtype, new ones become too.
    """
    dtype = torch.promote_types(k.dtype, v.dtype)
    if dtype is torch.float64:
        say_once("float64", "K and V of dtype float64 are stored and attended to in float32")
        dtype = torch.float32
    if held is not None and torch.promote_types(dtype, held) is held:
        dtype = held
    return k.to(dtype), v.to(dtype)


def in_held_dtype(
    attend: Callable[[Tensor, AttendConfig], Tensor], q: Tensor, config: AttendConfig
) -> Tensor:
    """Attend in fp32 where the query has a dtype that kernels don't take; the result is in q's."""
    return attend(q, config) if q.dtype in DTYPES else attend(q.float(), config).to(q.dtype)


def refuse_gradients(x: Tensor) -> Tensor:
    """Make a backward pass that reaches `x`, which stands for what a cache holds, raise.

    Without it, parameters behind `x` would miss a part of their gradients, or get none.
    """
    x.requires_grad_().register_hook(_refuse)  # type: ignore[no-untyped-call]
    return x


def _refuse(gradient: Tensor) -> None:
    raise KVPactError("there are no gradients through a compressed cache; run without one")


class KVHandle(Tensor):
    """K or V of all tokens of a layer, without the numbers."""

    pending: NewTokens
    side: str

    @staticmethod
    def __new__(
        cls,
        pending: NewTokens,
        side: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVHandle:
        """Make a handle for ``k`` or ``v``."""
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        handle.pending, handle.side = pending, side
        return handle

    def materialize(self) -> Tensor:
        """Return the decompressed tensor."""
        return self.pending.part(self.side)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVHandle({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation on decompressed tensors."""
        given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(x, KVHandle) and not x.pending.fresh for x in given):
            say_once("decompressed", _decompressed(func))
        args, kwargs = torch.utils._pytree.tree_map_only(
            KVHandle, lambda handle: handle.materialize(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def returned_pair(
    tokens: NewTokens, k: Tensor, v: Tensor, total: int, implementation: str | None
) -> tuple[Tensor, Tensor]:
    """Return what `update` returns for K and V of `total` tokens, like the new ones otherwise.

    Parameters
    ----------
    tokens : NewTokens
        What they stand for.
    k, v : Tensor
        The new tokens as the model gave them.
    total : int
        Tokens in all.
    implementation : str or None
        The model's attention. One that is known to run on any tensor gets handles; any other
        (``flex_attention`` compiles its inputs, ``flash_attention_2`` reads their memory)
        decompressed K and V.
    """
    made: list[Tensor] = []
    for side, x in (("k", k), ("v", v)):
        if implementation in _TAKES_HANDLES:
            shape = (*x.shape[:2], total, x.shape[3])
            made.append(KVHandle(tokens, side, shape, x.dtype, x.device))
        else:
            made.append(tokens.part(side))
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        made = [refuse_gradients(x) for x in made]
    return made[0], made[1]


def _decompressed(func: Any) -> str:
    return (
        f"{func.__name__.split('.')[0]!r} reads K or V, which are decompressed for it in every "
        "step: right, but slower and with a whole layer in memory; the padding of a batch is "
        "not known on this way and may be held as sink tokens. For attention over the "
        "compressed cache call model.set_attn_implementation('kvpact')"
    )
