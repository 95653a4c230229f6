"""Handles: the objects that `update` returns in place of K and V.

A tensor with the right shape, dtype and device and no storage, over which kvpact's attention
function attends; any other operation on it gets decompressed K or V.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.model.fallback import say_once

P = ParamSpec("P")
T = TypeVar("T")

_make = torch.Tensor._make_wrapper_subclass


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Keep ``torch.compile`` out of a function; elsewhere that takes next to no time."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def refuse_gradients(x: Tensor) -> Tensor:
    """Make a backward pass that reaches `x` raise, lest parameters before it miss gradients."""
    x.requires_grad_().register_hook(_refuse)  # type: ignore[no-untyped-call]
    return x


def _refuse(gradient: Tensor) -> None:
    raise KVPactError("there are no gradients through a compressed cache; run without one")


class KVHandle(Tensor):
    """K or V (`side`) of all tokens of a layer without numbers; `pending`: an `update`'s."""

    pending: Any
    side: str

    @staticmethod
    def of(pending: Any, side: str, shape: tuple[int, ...], like: Tensor) -> KVHandle:
        """Make a handle for ``k`` or ``v``, on the device and in the dtype of `like`."""
        handle: KVHandle = _make(KVHandle, shape, dtype=like.dtype, device=like.device)
        handle.pending, handle.side = pending, side
        return handle

    def materialize(self) -> Tensor:
        """Return the decompressed tensor."""
        shown = profiler._is_profiler_enabled
        with profiler.record_function("kvpact::decompress") if shown else nullcontext():
            whole: Tensor = self.pending.part(self.side)
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVHandle({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation on decompressed tensors."""
        given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        read = [x.pending for x in given if isinstance(x, KVHandle) and not x.pending.fresh]
        if read:
            say_once(
                "decompressed",
                f"{func.__name__.split('.')[0]!r} reads K or V, which are decompressed for it in "
                "every step: right, but slower and with a whole layer in memory; the padding of a "
                "batch is not known on this way and may be held as sink tokens. For attention over "
                "the compressed cache call model.set_attn_implementation('kvpact')",
                getattr(read[0], "origin", read[0]).shared,
            )
        args, kwargs = torch.utils._pytree.tree_map_only(
            KVHandle, lambda handle: handle.materialize(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


class HandlePair(NamedTuple):
    """The handles of a layer's `update`, used again once they are free: making is slow."""

    like: tuple[object, ...]  # tokens in all, shapes, dtypes and device: have to be the same
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


def new_pair(tokens: Any, k: Tensor, v: Tensor, total: int, like: tuple[object, ...]) -> HandlePair:
    """Return handles of tokens whose new ones are `k` and `v`, `total` in all."""
    k_shape, v_shape = (*k.shape[:2], total, k.shape[3]), (*v.shape[:2], total, v.shape[3])
    handles = KVHandle.of(tokens, "k", k_shape, k), KVHandle.of(tokens, "v", v_shape, v)
    return HandlePair(like, *handles)


_x = torch.empty(1, 1, 1, 1, dtype=torch.float32, device="cpu")
UNUSED = new_pair(None, _x, _x, 1, ()).references()
"""References to the handles of a pair that nothing else refers to."""
