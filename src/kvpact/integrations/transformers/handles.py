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
from kvpact.contract import AttendConfig, DequantResult


class FallbackWarning(UserWarning):
    """Something takes the slower way; the results are right."""


_said: set[str] = set()


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
        self.k, self.v, self._forget = k, v, forget
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
        return self.store(config.padding).attend(q, config)

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens, decompressed."""
        if self._parts is None:
            if self.fresh:
                return self.k if side == "k" else self.v
            result = self.store().dequantize(None, AttendConfig())
            self._parts = latent_parts(result, self.k) if self._latent else (result.k, result.v)
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


def handle_pair(tokens: NewTokens, k: Tensor, v: Tensor, total: int) -> tuple[KVHandle, KVHandle]:
    """Return handles for K and V of `total` tokens, like the new ones in everything else."""
    made = [
        KVHandle(tokens, side, (*x.shape[:2], total, x.shape[3]), x.dtype, x.device)
        for side, x in (("k", k), ("v", v))
    ]
    return made[0], made[1]


def _decompressed(func: Any) -> str:
    return (
        f"{func.__name__.split('.')[0]!r} reads K or V, which are decompressed for it in every "
        "step: right, but slower and with a whole layer in memory; the padding of a batch is "
        "not known on this way and may be held as sink tokens. For attention over the "
        "compressed cache call model.set_attn_implementation('kvpact')"
    )
