"""Handles: what `update` returns in place of K and V.

A handle is a tensor with the right shape, dtype and device and no storage. kvpact's attention
function sees it and attends over the packed slots. Any other operation on it gets decompressed
K or V instead: right in every model, only slower, and said once.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvpact.cache.tail import MOST_STEP
from kvpact.errors import KVPactError

if TYPE_CHECKING:
    from kvpact.integrations.transformers.latent import HeadTokens
    from kvpact.integrations.transformers.tokens import NewTokens


class FallbackWarning(UserWarning):
    """Something takes the slower way; the results are right."""


P = ParamSpec("P")
T = TypeVar("T")
_said: set[str] = set()

_make = torch.Tensor._make_wrapper_subclass

_TAKES_HANDLES = ("kvpact", "sdpa", "eager", None)


def say_once(key: str, message: str) -> None:
    """Warn with a `FallbackWarning`, once per `key` and process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, FallbackWarning, stacklevel=3)


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep ``torch.compile`` out of a function; elsewhere that takes next to no time."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


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

    pending: NewTokens | HeadTokens
    side: str

    @staticmethod
    def of(
        pending: NewTokens | HeadTokens, side: str, shape: tuple[int, ...], like: Tensor
    ) -> KVHandle:
        """Make a handle for ``k`` or ``v``, on the device and in the dtype of `like`."""
        handle: KVHandle = _make(KVHandle, shape, dtype=like.dtype, device=like.device)
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


class HandlePair(NamedTuple):
    """The handles that `update` returned for one layer, to be used again for the next one.

    Making two handles takes as long as everything else that a layer does here in a decode step.
    They are used again only where nobody refers to them any more: what a model keeps stays as it
    is.
    """

    like: tuple[object, ...]
    """Tokens in all, shapes, dtypes and device, which have to be the same."""
    k: KVHandle
    v: KVHandle

    def references(self) -> tuple[int, ...]:
        """Count the references to the handles, in Python and in C++."""
        return (
            sys.getrefcount(self.k),
            sys.getrefcount(self.v),
            self.k._use_count(),  # type: ignore[attr-defined]
            self.v._use_count(),  # type: ignore[attr-defined]
        )


def _new_pair(
    tokens: Any, k: Tensor, v: Tensor, total: int, like: tuple[object, ...]
) -> HandlePair:
    (batch, heads, _, width), (v_batch, v_heads, _, v_width) = k.shape, v.shape
    return HandlePair(
        like,
        KVHandle.of(tokens, "k", (batch, heads, total, width), k),
        KVHandle.of(tokens, "v", (v_batch, v_heads, total, v_width), v),
    )


_x = torch.empty(1, 1, 1, 1, dtype=torch.float32, device="cpu")
_UNUSED = _new_pair(None, _x, _x, 1, ()).references()
"""References to the handles of a pair that nothing else refers to."""


def returned_pair(tokens: NewTokens, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `update` returns for K and V of all tokens.

    Attention that is known to run on any tensor gets handles. Any other (``flex_attention``
    compiles its inputs, ``flash_attention_2`` reads their memory) gets decompressed K and V.
    """
    shared = tokens.shared
    differentiable = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    made: tuple[Tensor, Tensor]
    if shared.attention not in _TAKES_HANDLES:
        made = tokens.part("k"), tokens.part("v")
    else:
        like = tokens.total, k.shape, v.shape, k.dtype, v.dtype, k.device
        # Taken away first, so that no other thread gets the same.
        pair, shared.handles = shared.handles, None
        if pair is None or pair.like != like or pair.references() != _UNUSED:
            pair = _new_pair(tokens, k, v, tokens.total, like)
        pair.k.pending = pair.v.pending = tokens
        made = pair.k, pair.v
        if not differentiable and k.shape[2] <= MOST_STEP:
            shared.handles = pair
    if differentiable:
        made = refuse_gradients(made[0]), refuse_gradients(made[1])
    return made


def _decompressed(func: Any) -> str:
    return (
        f"{func.__name__.split('.')[0]!r} reads K or V, which are decompressed for it in every "
        "step: right, but slower and with a whole layer in memory; the padding of a batch is "
        "not known on this way and may be held as sink tokens. For attention over the "
        "compressed cache call model.set_attn_implementation('kvpact')"
    )
