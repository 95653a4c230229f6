"""Calls that are alike: what a `StepRunner` was made for once, it serves again."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.kernels.base import AttendCall
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.views import LayerView

_Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape (that of a row where rows are many), strides and dtype of a tensor."""


class AlikeCalls:
    """Shapes, strides, dtypes, device and rules of calls with new tokens.

    `call`: a call like those to come, with a view and new tokens; `good`: see `StepRunner`.
    """

    good: Tensor | None = None

    def __init__(self, call: AttendCall) -> None:
        assert call.view is not None and call.k is not None and call.v is not None
        self.config = call.config
        self.sources: tuple[SegmentSource, SegmentSource]
        self.sources = (call.view.k.source, call.view.v.source)
        self._device = call.q.get_device()
        self._like = [(tuple(x.shape), x.stride(), x.dtype) for x in (call.k, call.v, call.q)]
        self._row_like = [(shape[1:], stride, dtype) for shape, stride, dtype in self._like]

    def fits(self, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> bool:
        """Whether a call is like the one that this was made for."""
        if config is not self.config and not _equal(config, self.config):
            return False
        like_k, like_v, like_q = self._like
        return self._alike(k, like_k) and self._alike(v, like_v) and self._alike(q, like_q)

    def fits_rows(self, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, rows: int) -> bool:
        """Whether a call has so many rows, each like the call that this was made for."""
        if config is not self.config and not _equal(config, self.config):
            return False
        like_k, like_v, like_q = self._row_like
        alike = self._alike
        return alike(k, like_k, rows) and alike(v, like_v, rows) and alike(q, like_q, rows)

    def alike(self, other: object) -> bool:
        """Whether two are for calls that are alike, but for their slots."""
        if self is other:
            return True
        if not isinstance(other, type(self)) or self._like != other._like:
            return False
        return self.config is other.config or _equal(self.config, other.config)

    def over(self, view: LayerView) -> Self | None:
        """Return nothing: a backend that knows better says so."""
        return None

    def _alike(self, x: Tensor, like: _Like, rows: int = 0) -> bool:
        """Whether a tensor is like those before; if `rows` are named, but for so many in front."""
        if type(x) is not Tensor or x.requires_grad or x.get_device() != self._device:
            return False
        shape = (rows, *like[0]) if rows else like[0]
        try:
            return x.shape == shape and x.stride() == like[1] and x.dtype is like[2]
        except RuntimeError:  # sparse and nested ones have none; the ordinary way names them
            return False


def _equal(a: AttendConfig, b: AttendConfig) -> bool:
    """Whether configs without tensors are equal."""
    tensors = (x for c in (a, b) for x in (c.mask, c.padding, c.sink_logits, c.origin))
    return all(x is None for x in tensors) and a == b
