"""K and V of a call as the torch body of attention reads them: heads', or latents, absorbed.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2) caches one latent `c` of width r and one rotated key
`k_r` of width d_r per token, shared by all heads. The keys and values of head h are

    k_h = [W_UK_h c, k_r],    v_h = W_UV_h c,

so the logits are `q_nope · W_UK_h c + q_rope · k_r = [W_UK_h^T q_nope, q_rope] · [c, k_r]`, and the
output is `W_UV_h` times the mean of the latents. With W_UK taken into the query and W_UV into the
output, all heads attend over one shared key `[c, k_r]` and one shared value `c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvpact.kernels.torch.slots import read
from kvpact.kernels.views import LayerView, StreamView


class SeparateTokens:
    """K and V of each head; `rows`: scaled queries `[B, H_kv, R, D]`; `dim`: the output's."""

    def __init__(self, view: LayerView | None, rows: Tensor, dim: int) -> None:
        self._view, self._rows = view, rows
        self._rotated = rows if view is None else transformed(view.k, rows)

    def held(self, start: int, end: int) -> tuple[Tensor, Tensor, bool]:
        """Return logits `[B, H_kv, R, t]`, values, and whether these are transformed."""
        assert self._view is not None
        k, packed = tokens(self._view.k, start, end)
        v, packed_v = tokens(self._view.v, start, end)
        logits = (self._rotated if packed else self._rows) @ k.mT
        known = self._view.k.offset_logits(self._rows, start, end) if packed else None
        return logits if known is None else logits.add_(known), v, packed_v

    def new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values of new tokens."""
        return self._rows @ k.float().mT, v


def transformed(stream: StreamView, rows: Tensor) -> Tensor:
    """Return queries for the stream's packed tokens, if there are any."""
    return stream.codec.transform.forward(rows) if stream.exact_from else rows


def tokens(stream: StreamView, start: int, end: int) -> tuple[Tensor, bool]:
    """Return tokens in fp32, and whether they are packed (and therefore transformed)."""
    if start >= stream.exact_from:
        return stream.exact(start, end).float(), False
    return read(stream, start, end), True


def absorb_query(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """Return the query over latents `[B, H, S, r + d_rope]`, by `w_uk` `[H, d_nope, r]`."""
    return torch.cat([q_nope @ w_uk, q_rope], dim=-1)


def expand_output(output: Tensor, w_uv: Tensor) -> Tensor:
    """Return `W_UV` (`[H, d_v, r]`) times an output `[B, H, S, r]`: `[B, H, S, d_v]`."""
    return output @ w_uv.mT


Decode = Callable[[StreamView, int, int, Tensor], None]
"""Writes packed tokens `start <= t < end` to its last argument, as numbers."""


class KeyMaking(Protocol):
    """Makes keys of values `[B, H_kv, t, D]`, given the first one's place among all tokens."""

    def make(self, v: Tensor, start: int) -> Tensor:
        """Return the keys, in the values' dtype."""

    def logits(self, rows: Tensor, v: Tensor, start: int) -> Tensor:
        """Return `rows @ make(v, start).mT` `[B, H_kv, R, t]` of fp32 values, but for rounding.

        `rows`: `[B, H_kv, R, D]`, the same ones for all tokens of a call.
        """


class MadeTokens:
    """Values, of which `keys` makes keys as they are read (K = V); see `SeparateTokens`."""

    def __init__(
        self,
        view: LayerView | None,
        rows: Tensor,
        decode: Decode,
        keys: KeyMaking,
    ) -> None:
        self._view, self._rows, self._decode, self._keys = view, rows, decode, keys
        self._place, self._memory = 0 if view is None else view.length, rows

    def held(self, start: int, end: int) -> tuple[Tensor, Tensor, bool]:
        """Return logits `[B, H_kv, R, t]`, values, and that these are not transformed."""
        assert self._view is not None
        view = self._view.v
        if start >= view.exact_from:
            v = view.exact(start, end)
            return self._rows @ self._keys.make(v, start).float().mT, v, False
        shape = (*view.tail.shape[:2], end - start, view.tail.shape[3])
        if self._memory.shape != shape:
            self._memory = self._rows.new_empty(shape)
        self._decode(view, start, end, self._memory)
        return self._keys.logits(self._rows, self._memory, start), self._memory, False

    def new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values of new tokens."""
        start, self._place = self._place, self._place + v.shape[2]
        return self._rows @ self._keys.make(v, start).float().mT, v


class LatentTokens:
    """Latents and rotated keys, for the torch body; `rows`: `[B, 1, R, r + d_rope]`; `dim`: r."""

    def __init__(self, view: LayerView | None, rows: Tensor, dim: int) -> None:
        self._view = view
        self._exact = q_c, q_r = rows[..., :dim], rows[..., dim:]
        self._rotated = self._exact
        if view is not None:
            self._rotated = transformed(view.k, q_c), transformed(view.v, q_r)

    def held(self, start: int, end: int) -> tuple[Tensor, Tensor, bool]:
        """Return logits `[B, 1, R, t]`, latents, and whether these are transformed."""
        assert self._view is not None
        c, packed = tokens(self._view.k, start, end)
        r, packed_r = tokens(self._view.v, start, end)
        q_c = (self._rotated if packed else self._exact)[0]
        q_r = (self._rotated if packed_r else self._exact)[1]
        return q_c @ c.mT + q_r @ r.mT, c, packed

    def new(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and latents of new tokens."""
        return self._exact[0] @ c.float().mT + self._exact[1] @ r.float().mT, c
