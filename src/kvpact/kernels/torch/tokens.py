"""K and V of a call as the torch body of attention reads them."""

from __future__ import annotations

from torch import Tensor

from kvpact.kernels.torch.decode import read
from kvpact.kernels.views import LayerView, StreamView


class SeparateTokens:
    """Keys and values of each head.

    `rows`: `[B, H_kv, R, D]`, the scaled queries; `dim`: width of the output.
    """

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
