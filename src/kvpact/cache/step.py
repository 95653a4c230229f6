"""What one call gave a layer, and what the layer held before: all that attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.dequant import dequant_result
from kvpact.contract import AttendConfig, DequantResult
from kvpact.kernels import (
    Kernel,
    LayerView,
    Row,
    attend,
    attend_latent,
    attend_rows,
)


@dataclass(frozen=True)
class Step:
    """New tokens beside a view of the past.

    Parameters
    ----------
    view : LayerView or None
        The past; with `exact_new=False` the new tokens are in it as they are stored.
    k, v : Tensor
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]` as given; no tokens with `exact_new=False`.
    padding : Tensor or None
        `[B]` left-padding tokens.
    lock : lock
        The layer's: the past is read under it, so that nobody rolls it back meanwhile.
    latent : bool
        `k` and `v` are MLA latents and rotated keys (see `kernels.torch.latent`).
    kernel : Kernel or None
        What computes; torch if omitted.
    """

    view: LayerView | None
    k: Tensor
    v: Tensor
    padding: Tensor | None
    lock: AbstractContextManager[Any]
    latent: bool = False
    kernel: Kernel | None = None

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and the new tokens: `[B, H_q, q_len, D_v]` (latents: `r`).

        Raises
        ------
        GeometryError
            Heads or mask don't fit.
        StaleResult
            The cache was rolled back, reordered or reset since.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.attend(q, config)
        k, v = (self.k, self.v) if self.k.shape[2] else (None, None)
        with self.lock:
            if self.view is not None:
                self.view.k.check()
            compute = attend_latent if self.latent else attend
            return compute(self.view, k, v, q, config, self.padding, self.kernel)

    def dequantize(self, q: Tensor | None, config: AttendConfig) -> DequantResult:
        """Return K and V of all tokens, decompressed when read.

        The new tokens are the tensors that were given: they may not be overwritten before.
        """
        return dequant_result(self.view, self.k, self.v, q, config, self.lock, self.latent)


@torch.no_grad()
def attend_steps(steps: Sequence[Step], q: Tensor, configs: Sequence[AttendConfig]) -> Tensor:
    """Attend over many sequences' steps, each a row of `q`: `[N, H_q, q_len, D_v]`.

    Raises
    ------
    GeometryError, StaleResult
        As of `Step.attend`.
    """
    queries = torch.split(q, 1)
    if any(step.latent for step in steps):
        rows = zip(steps, queries, configs, strict=True)
        return torch.cat([step.attend(x, config) for step, x, config in rows])
    with ExitStack() as locks:
        # All are read at once. Nobody takes one of these locks while holding another, but here;
        # and here they are always taken in one order.
        for step in sorted(steps, key=lambda step: id(step.lock)):
            locks.enter_context(step.lock)
        calls = []
        for step, x, config in zip(steps, queries, configs, strict=True):
            if step.view is not None:
                step.view.k.check()
            k, v = (step.k, step.v) if step.k.shape[2] else (None, None)
            calls.append(Row(step.view, k, v, x, config, step.padding, step.kernel))
        return attend_rows(calls)
