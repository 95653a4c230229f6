"""Packed keys of an index, multiplied by the model's own code without being dequantised.

What `update_indexer` returns in a step of a few tokens stands for the keys of all tokens. It
follows the products that the indexers of DeepSeek V3.2 and its kin and of MiniMax M3 are made of,
``(q @ keys.mT * scale).relu()`` and its sum weighted over heads, and has `kernels.index_scores`
compute them. For any other operation it is the dequantised keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvpact.kernels import index_scores
from kvpact.quantizers.channels import from_integers

_make = torch.Tensor._make_wrapper_subclass
_F32 = torch.float32


class PackedKeys(NamedTuple):
    """An index' keys: `codes`, `scale`, then `tail` `[B, m, D]`; the backend `requested`."""

    codes: Tensor
    scale: Tensor
    tail: Tensor
    requested: str = "auto"

    def whole(self) -> Tensor:
        """Return the keys, dequantised, `[B, T, D]`."""
        packed = from_integers(self.codes, self.scale, 1, 0)
        return torch.cat([packed.to(self.tail.dtype), self.tail], 1)

    def scores(self, q: Tensor, weight: Tensor | None) -> Tensor:
        """Return `index_scores` of packed and exact keys."""
        last = self.tail.shape[1]
        found = index_scores(self.codes, self.scale, q, weight, self.requested, last)
        exact = q @ self.tail.float().mT.unsqueeze(1)
        if weight is not None:
            exact = (weight.unsqueeze(-2) @ exact.relu()).squeeze(-2)
        found[..., found.shape[-1] - last :] = exact
        return found


class _Handle(Tensor):
    """A tensor without storage; what its class does not know how to do is done with `whole`."""

    keys: PackedKeys
    numbers: Tensor | None = None

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, keys: PackedKeys, **own: Any) -> Self:
        """Return one of a shape, with attributes of its own."""
        made: Self = _make(cls, shape, dtype=dtype, device=keys.tail.device)
        vars(made).update(own, keys=keys)
        return made

    def whole(self) -> Tensor:
        """Return the tensor that this stands for, and stand for that one from now on."""
        if self.numbers is None:
            self.numbers = self.made()
        return self.numbers

    def made(self) -> Tensor:
        """Return the tensor that this stands for, newly made."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow the operations that are known."""
        follow, kwargs = _KNOWN.get(func), kwargs or {}
        made = any(isinstance(x, _Handle) and x.numbers is not None for x in args)
        if follow is not None and not made and (not kwargs or kwargs == {"inplace": False}):
            known = follow(*args)
            if known is not None:
                return known
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)  # properties; all else goes where numbers are

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do any other operation with the numbers."""
        given = args, kwargs or {}
        args, kwargs = torch.utils._pytree.tree_map_only(_Handle, _Handle.whole, given)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class KeysHandle(_Handle):
    """Keys of all tokens, `[B, T, D]`, with an axis of one before T or not, turned or not."""

    turned = False

    @classmethod
    def of(cls, keys: PackedKeys) -> Self:
        """Return the handle of keys."""
        rows, count, width = keys.tail.shape
        return cls.like((rows, count + keys.codes.shape[1], width), keys.tail.dtype, keys)

    def made(self) -> Tensor:
        """Return the keys, dequantised."""
        x = self.keys.whole().to(self.dtype)
        x = x.unsqueeze(1) if self.dim() == 4 else x
        return x.mT if self.turned else x


class ScoresHandle(_Handle):
    """Products of queries `q` `[B, S, H, D]` with the keys, clipped ones alone if `clipped`."""

    q: Tensor
    clipped = False

    def made(self) -> Tensor:
        """Return the products, `[B, S, H, T]`."""
        products = self.keys.scores(self.q, None)
        return products.relu() if self.clipped else products


def _plain(x: Any) -> bool:
    """Return whether scores may be computed from a tensor; a choice has no gradient."""
    tracked = torch.is_grad_enabled() and x.requires_grad if isinstance(x, Tensor) else True
    return type(x) is Tensor and x.dtype is _F32 and x.dim() == 4 and not tracked


def _float(x: Any) -> Any:
    if not isinstance(x, KeysHandle):
        return None
    return KeysHandle.like(x.shape, _F32, x.keys, turned=x.turned)


def _transpose(x: Any, one: int, other: int) -> Any:
    last = x.dim() - 2, x.dim() - 1
    if not isinstance(x, KeysHandle) or sorted((one % x.dim(), other % x.dim())) != [*last]:
        return None
    shape = *x.shape[:-2], x.shape[-1], x.shape[-2]
    return KeysHandle.like(shape, x.dtype, x.keys, turned=not x.turned)


def _unsqueeze(x: Any, axis: int) -> Any:
    if not isinstance(x, KeysHandle) or x.dim() != 3 or axis != 1:
        return None
    return KeysHandle.like((x.shape[0], 1, *x.shape[1:]), x.dtype, x.keys, turned=x.turned)


def _matmul(one: Any, other: Any) -> Any:
    if not _plain(one) or not isinstance(other, _Handle) or other.dtype is not _F32:
        return None
    if isinstance(other, KeysHandle):
        fits = other.dim() == 4 and other.turned
        fits = fits and (one.shape[0], one.shape[3]) == (other.shape[0], other.shape[2])
        return _scores(other.keys, one, False) if fits else None
    assert isinstance(other, ScoresHandle)
    if not other.clipped or one.shape != (*other.shape[:2], 1, other.shape[2]):
        return None
    return other.keys.scores(other.q, one.squeeze(-2)).unsqueeze(-2)


def _scores(keys: PackedKeys, q: Tensor, clipped: bool) -> ScoresHandle:
    shape = *q.shape[:3], keys.codes.shape[1] + keys.tail.shape[1]
    return ScoresHandle.like(shape, _F32, keys, q=q.detach(), clipped=clipped)


def _mul(x: Any, factor: Any) -> Any:
    if not isinstance(x, ScoresHandle) or x.clipped or type(factor) not in (int, float):
        return None
    return _scores(x.keys, x.q * factor, False)


def _relu(x: Any) -> Any:
    return _scores(x.keys, x.q, True) if isinstance(x, ScoresHandle) else None


_KNOWN: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float,
    Tensor.transpose: _transpose,
    Tensor.unsqueeze: _unsqueeze,
    torch.matmul: _matmul,
    Tensor.mul: _mul,
    Tensor.__mul__: _mul,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.nn.functional.relu: _relu,
}
"""The replacements of operations of indexers; they return None for a call that is no such one."""
