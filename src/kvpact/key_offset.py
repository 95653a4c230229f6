"""A key's part that is known beforehand: the bias of the key projection, turned by RoPE.

Keys of Qwen2, GPT-OSS, Phi, StarCoder2 and GPT-NeoX are `R_t (W x + b)`, R_t the rotation at
position t. Where `b` is large, its codes leave no bits for `W x`. `R_t b` is known: it is taken off
before a key is encoded, and is in the numbers and logits again that are read.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import DtypeError, GeometryError, NonFiniteError

Layout = Literal["half", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAVE = 0.001
"""Share of a bias' norm that `KeyOffset.from_bias` leaves in the keys if nothing else is said."""


@dataclass(frozen=True, eq=False)
class KeyOffset:
    """`R_t b` of one layer: what each of its keys has by its position t alone.

    The pair (i, j) of channels of head h turns by the angle `a = t * frequency`:

        k[i] = scaling * (b[0] cos a - b[1] sin a),    k[j] = scaling * (b[1] cos a + b[0] sin a)

    Numbers are rounded to fp32, the angle too, as models compute it.

    Parameters
    ----------
    frequencies : sequence of float
        `[P]`: of each pair, in radians per position; 0 where a channel is not rotated.
    channels : sequence of (int, int)
        `[P, 2]`: the channels of each pair. No channel is in two pairs.
    bias : sequence
        `[H_kv, P, 2]`: b, by KV head and pair. Tensors will do for all three.
    scaling : float
        The rope type's attention scaling (YaRN), a factor on cosine and sine.
    dtype : torch.dtype
        Cosine and sine are rounded to fp32, fp16 or bf16, as models do that run in it.

    Raises
    ------
    GeometryError
        Shapes that don't fit each other, no pair, a channel below 0 or in two pairs.
    DtypeError
        What is no number; another dtype.
    NonFiniteError
        A number that is NaN or infinite.
    """

    frequencies: tuple[float, ...]
    channels: tuple[tuple[int, int], ...]
    bias: tuple[tuple[tuple[float, float], ...], ...]
    scaling: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        frequencies = _numbers("frequencies", self.frequencies, 1)
        bias = _numbers("bias", self.bias, 3)
        scaling = _numbers("scaling", self.scaling, 0)
        channels = _tensor("channels", self.channels)
        if channels.is_floating_point() or channels.dtype == torch.bool:
            raise DtypeError(f"channels should be whole numbers, not {channels.dtype}")
        pairs = len(frequencies)
        if not pairs or channels.shape != (pairs, 2) or bias.shape[1:] != (pairs, 2):
            raise GeometryError(
                f"a key offset has frequencies [P], channels [P, 2] and bias [H_kv, P, 2], P > 0, "
                f"not {list(frequencies.shape)}, {list(channels.shape)} and {list(bias.shape)}"
            )
        flat = channels.flatten().tolist()
        if min(flat) < 0 or len(set(flat)) < len(flat):
            raise GeometryError(f"channels should be 0 or more, each of them once, not {flat}")
        if self.dtype not in DTYPES:
            raise DtypeError(f"cosine and sine are fp32, fp16 or bf16, not {self.dtype}")
        given = {
            "frequencies": tuple(frequencies.tolist()),
            "channels": tuple((i, j) for i, j in channels.tolist()),
            "bias": tuple(tuple((x, y) for x, y in head) for head in bias.tolist()),
            "scaling": float(scaling),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_bias(
        cls,
        bias: Tensor,
        frequencies: Tensor,
        layout: Layout = "half",
        *,
        scaling: float = 1.0,
        dtype: torch.dtype = torch.float32,
        leave: float | Tensor = LEAVE,
    ) -> KeyOffset | None:
        """Return the offset of a key projection's bias: of those few pairs that hold most of it.

        None where nothing is to be taken. Errors are those of `KeyOffset`.

        Parameters
        ----------
        bias : Tensor
            `[H_kv, D]`, as it is added before the rotation.
        frequencies : Tensor
            `[R / 2]`, RoPE's, in radians per position (``inv_freq``); the first R channels of a
            head are rotated.
        layout : {"half", "interleaved"}
            Whether channels p and p + R / 2 are a pair, or 2 p and 2 p + 1.
        scaling, dtype
            As of `KeyOffset`. Channels that are not rotated are not scaled either.
        leave : float or Tensor
            Norm that may stay in the keys of each head, as a share of its bias' norm (one number,
            or `[H_kv]`): the largest pairs are taken until no more is left than that.
        """
        if layout not in LAYOUTS:
            raise GeometryError(f"layout should be one of {', '.join(LAYOUTS)}, not {layout!r}")
        if scaling == 0:
            raise GeometryError("scaling should not be 0")
        b = _numbers("bias", bias, 2)
        turning = _numbers("frequencies", frequencies, 1)
        rotated, dim = 2 * len(turning), b.shape[1]
        if rotated > dim:
            raise GeometryError(f"{len(turning)} frequencies rotate {rotated} channels of {dim}")
        every = torch.arange(dim - (dim - rotated) % 2, dtype=torch.int64, device="cpu")
        pairs = every[:rotated].view(2, -1).T
        if layout == "interleaved":
            pairs = every[:rotated].view(-1, 2)
        still = every[rotated:].view(-1, 2)
        channels = torch.cat([pairs, still])
        frequency = torch.cat([turning, turning.new_zeros(len(still))])
        values = b[:, channels]
        values[:, len(pairs) :] /= scaling
        sizes = values.double().square().sum(-1)
        # What is left once so many pairs are taken, the largest of any head first.
        share = sizes / sizes.sum(1, keepdim=True).clamp(min=torch.finfo(torch.double).tiny)
        limit = torch.as_tensor(leave, dtype=torch.double, device="cpu").square().expand(len(b))
        order = (share / limit.clamp(min=1e-12).unsqueeze(1)).amax(0).argsort(descending=True)
        left = share[:, order].flip(1).cumsum(1).flip(1)
        too_much = (left > limit.unsqueeze(1)).any(0).nonzero().flatten()
        if not len(too_much):
            return None
        kept = order[: int(too_much[-1]) + 1].sort().values
        given: tuple[Any, Any, Any] = (frequency[kept], channels[kept], values[:, kept])
        return cls(*given, scaling=scaling, dtype=dtype)

    @property
    def heads(self) -> int:
        """KV heads."""
        return len(self.bias)

    @property
    def norm(self) -> float:
        """Norm of the longest head's bias, scaled."""
        numbers = torch.tensor(self.bias, dtype=torch.double, device="cpu")
        return float(numbers.flatten(1).norm(dim=1).max()) * abs(self.scaling)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-256 over all numbers; equal digests, equal offsets."""
        numbers = [*self.frequencies, *(x for head in self.bias for pair in head for x in pair)]
        flat = [channel for pair in self.channels for channel in pair]
        head = f"{self.heads} {len(flat)} {self.scaling!r} {self.dtype}\n".encode()
        data = struct.pack(f"<{len(numbers)}f{len(flat)}q", *numbers, *flat)
        return hashlib.blake2b(head + data, digest_size=32).hexdigest()

    def check_fits(self, heads: int, dim: int) -> None:
        """Raise `GeometryError` unless it is of keys of so many heads and channels."""
        most = max(map(max, self.channels))
        if self.heads != heads or most >= dim:
            raise GeometryError(
                f"the key offset is of {self.heads} KV heads and channels up to {most}; the cache "
                f"has {heads} of width {dim}"
            )

    def __repr__(self) -> str:
        pairs = len(self.frequencies)
        return f"KeyOffset(heads={self.heads}, pairs={pairs}, norm={self.norm:.1f})"


def same_offset(one: KeyOffset | None, other: KeyOffset | None) -> bool:
    """Return whether two offsets are equal, or both none."""
    if one is None or other is None:
        return one is other
    return one is other or one.digest == other.digest


def _tensor(name: str, value: Any) -> Tensor:
    try:
        if isinstance(value, Tensor):
            return value.detach().to("cpu")
        # As numpy reads numbers: torch would read floats in its default dtype.
        return torch.from_numpy(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"{name} should be numbers, not {value!r}") from None


def _numbers(name: str, value: Tensor | Sequence[Any] | float, dims: int) -> Tensor:
    """Return fp32 numbers with so many axes, or raise what is wrong with them."""
    x = _tensor(name, value)
    if x.dtype == torch.bool or x.is_complex():
        raise DtypeError(f"{name} should be real numbers, not {x.dtype}")
    if x.dim() != dims:
        raise GeometryError(f"{name} should have {dims} axes, not shape {list(x.shape)}")
    x = x.to(torch.float32, copy=True)
    if not all(map(math.isfinite, (float(x.sum()), float(x.abs().sum())))):
        raise NonFiniteError(f"{name} holds NaN, infinity or too large numbers")
    return x
