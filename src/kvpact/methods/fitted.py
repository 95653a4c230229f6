"""Codecs that learn from tokens before they encode: a basis, a codebook, scales of channels.

What is learnt is the codec's *state*: tensors that count among the bytes of whatever holds the
codec. `fit` returns a fitted codec. A codec that was never fitted learns from the first tokens that
it encodes and keeps that: then, other than with every other codec, the bytes of later tokens depend
on how many came first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvpact.errors import FormatError, GeometryError, NonFiniteError, SpecError
from kvpact.key_rotation import KeyRotation
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.methods.context import Context
from kvpact.quantizers.numbers import all_finite


class Calibrating(NamedTuple):
    """A model's results for calibration tokens, besides the keys or values themselves.

    - `query_energy`: `[B, H, T, D]` fp32: mean square of the queries of each KV head.
    - `output_energy`: `[H, D_v]`: what the output projection makes of channels of V, where known.
    """

    v: Tensor
    query_energy: Tensor
    output_energy: Tensor | None = None
    rotation: KeyRotation | None = None
    sinks: int = 4


class Part(NamedTuple):
    """The place of a tensor of a state among the numbers of all, with its shape and dtype."""

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateInOne(Mapping[str, Tensor]):
    """A state in one tensor of 16-bit numbers: one pins less memory than many."""

    __slots__ = ("_memory", "_parts")

    def __init__(self, memory: Tensor, parts: Mapping[str, Part]) -> None:
        self._memory, self._parts = memory, parts

    @staticmethod
    def parts(fields: Mapping[str, tuple[int, torch.dtype]], heads: int) -> dict[str, Part]:
        """Return where the fields of a state lie, `[heads, width]` each, one after the other."""
        ends = accumulate((heads * width for width, _ in fields.values()), initial=0)
        return {
            name: Part(start, start + heads * width, (heads, width), dtype)
            for start, (name, (width, dtype)) in zip(ends, fields.items(), strict=False)
        }

    def __getitem__(self, name: str) -> Tensor:
        start, end, shape, dtype = self._parts[name]
        return self._memory[start:end].view(dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def held_parts(self) -> tuple[Tensor]:
        """Return what takes memory (see `kvpact.testing.held_tensors`)."""
        return (self._memory,)


class FittedCodec(Codec):
    """A codec of vectors of width `dim` with a learnt state, frozen once it is there."""

    before_rope: bool = False
    """Keys are stored as they are before RoPE, if the calibration knows it."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._state: Mapping[str, Tensor] = {}

    @property
    def fitted(self) -> bool:
        """True if the state is there."""
        return bool(self._state)

    ready = fitted

    def state(self) -> dict[str, Tensor]:
        """Return the tensors learnt, by name; empty before."""
        return dict(self._state)

    def require_fitted(self) -> None:
        """Raise `SpecError` unless the state is there."""
        if not self.fitted:
            raise SpecError(
                f"{type(self).__name__} is not fitted yet; make the cache with "
                "calibration=kvpact.calibration_of(model), or call fit with calibration tokens"
            )

    def fit(self, x: Tensor) -> Self:
        """Return a codec that learnt from `[B, H, T, D]`: `GeometryError`, `NonFiniteError`."""
        if x.dim() != 4 or x.shape[3] != self._dim or x.numel() == 0:
            raise GeometryError(
                f"calibration tokens have shape {tuple(x.shape)}; they should be [batch, heads, "
                f"tokens, {self._dim}] and not empty"
            )
        if not all_finite(x):
            raise NonFiniteError("calibration tokens hold NaN or infinity")
        return self.restore(self._learn(x.to(torch.float32)))

    def learn(self, x: Tensor, context: Context) -> Self:
        """Return a codec that learnt from the first tokens that a cache packs."""
        return self.fit(x)

    def calibrated(self, x: Tensor, known: Calibrating) -> Self:
        """Return a codec that learnt from calibration tokens (keys without offset); see `fit`."""
        return self.fit(x)

    def check_heads(self, heads: int) -> None:
        """Raise `FormatError` if the state is of another number of heads, where it has one."""
        return None

    def restore(self, state: Mapping[str, Tensor]) -> Self:
        """Return a codec with a state that `state` gave. Raises `FormatError`."""
        self._check_state(state)
        return self.with_state(state)

    def succeeding(
        self, state: Mapping[str, Tensor], first: Callable[[], Tensor], context: Context
    ) -> Self:
        """Return a codec with what a like one learnt; `first` gives the first tokens, decoded."""
        return self.restore(state)

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """Return a codec with a state that one like this has just learnt: it is not checked."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # a third of copy.copy's time
        other._set(state)
        return other

    def _set(self, state: Mapping[str, Tensor]) -> None:
        self._state = state if isinstance(state, StateInOne) else dict(state)

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise FormatError(f"{type(self).__name__}: not a state of this codec: {what}")

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Encode tokens; learn from them first if nothing was learnt yet."""
        if not self.fitted:
            self._set(self._learn(x))
        # Without groups nothing is frozen, and a codec's own `_encode` need not take it.
        return self._encode(x) if frozen is None else self._encode(x, frozen)

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo `encode` but for the transform."""
        self.require_fitted()
        return self._decode(arrays)

    @abstractmethod
    def _learn(self, x: Tensor) -> dict[str, Tensor]:
        """Return the state that tokens `[B, H, T, D]` (fp32) lead to, never empty."""

    @abstractmethod
    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise `FormatError` unless `state` is one of this codec."""

    @abstractmethod
    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Encode with the state."""

    @abstractmethod
    def _decode(self, arrays: Arrays) -> Tensor:
        """Decode with the state."""


class KeysThatLearn(FittedCodec):
    """Keys that learn from the first tokens of a cache and what is known of these: by KV head."""

    @abstractmethod
    def state_fields(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return what is learnt: `[H, width]` tensors by name, their width and dtype."""

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of what is learnt."""
        return heads * sum(width * kind.itemsize for width, kind in self.state_fields().values())

    def learn(self, x: Tensor, context: Context) -> Self:
        """Return a codec that learnt from the first tokens of a cache."""
        return self.with_state(self._learn(x, context))

    def check_heads(self, heads: int) -> None:
        """Raise `FormatError` if the state is of another number of heads."""
        self._check(all(len(x) == heads for x in self._state.values()), f"not of {heads} heads")

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        fields = self.state_fields()
        self._check(state.keys() == fields.keys(), ", ".join(sorted(state)))
        heads = len(next(iter(state.values())))
        for name, (width, kind) in fields.items():
            tensor = state[name]
            good = tensor.shape == (heads, width) and tensor.dtype is kind
            self._check(good and bool(tensor.isfinite().all()), name)

    @abstractmethod
    def _learn(self, x: Tensor, context: Context | None = None) -> dict[str, Tensor]: ...


class FittedMethod(Method):
    """A method whose codecs are of the class `FittedCodec`."""
