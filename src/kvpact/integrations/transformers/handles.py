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

    k: Tensor
    v: Tensor

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and these tokens."""

    def dequantize(self) -> DequantResult:
        """Return K and V of all tokens."""


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
        self.waiting = True
        self._step: Step | None = None
        self._result: DequantResult | None = None

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

    def dequantize(self) -> DequantResult:
        """Return K and V of all tokens."""
        if self._result is None:
            self._result = self.store().dequantize(None, AttendConfig())
        return self._result


class KVHandle(Tensor):
    """K or V of all tokens of a layer, without the numbers."""

    pending: NewTokens
    side: str

    @staticmethod
    def __new__(cls, pending: NewTokens, side: str, total: int) -> KVHandle:
        """Make a handle for ``k`` or ``v`` of `total` tokens."""
        new = pending.k if side == "k" else pending.v
        shape = (*new.shape[:2], total, new.shape[3])
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=new.dtype, device=new.device
        )
        handle.pending, handle.side = pending, side
        return handle

    def materialize(self) -> Tensor:
        """Return the decompressed tensor."""
        result = self.pending.dequantize()
        return result.k if self.side == "k" else result.v

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVHandle({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation on decompressed tensors."""
        say_once(
            "decompressed",
            f"{func.__name__.split('.')[0]!r} reads K or V, which are decompressed for it in every "
            "step: right, but slower and with a whole layer in memory; the padding of a batch is "
            "not known on this way and may be held as sink tokens. For attention over the "
            "compressed cache call model.set_attn_implementation('kvpact')",
        )
        args, kwargs = torch.utils._pytree.tree_map_only(
            KVHandle, lambda handle: handle.materialize(), (args, kwargs or {})
        )
        return func(*args, **kwargs)
