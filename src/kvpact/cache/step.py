"""What one call gave a layer, and what the layer held before: all that attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.dequant import dequant_result
from kvpact.contract import AttendConfig, DequantResult
from kvpact.errors import GeometryError
from kvpact.kernels import AttendCall, LayerView, Plan


class Step(NamedTuple):
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
    plan : Plan
        Who computes.
    latent : bool
        `k` and `v` are MLA latents and rotated keys.
    """

    view: LayerView | None
    k: Tensor
    v: Tensor
    padding: Tensor | None
    lock: AbstractContextManager[Any]
    plan: Plan
    latent: bool = False

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
        with self.lock:
            return self.plan.attend((self._call(q, config),))

    def _call(self, q: Tensor, config: AttendConfig) -> AttendCall:
        if self.view is not None:
            self.view.k.check()
        k, v = (self.k, self.v) if self.k.shape[2] else (None, None)
        return AttendCall(self.view, k, v, q, config, self.padding, self.latent)

    def dequantize(self, q: Tensor | None, config: AttendConfig) -> DequantResult:
        """Return K and V of all tokens, decompressed when read.

        The new tokens are the tensors that were given: they may not be overwritten before.
        """
        return dequant_result(self, q, config)


@torch.no_grad()
def attend_steps(steps: Sequence[Step], q: Tensor, configs: Sequence[AttendConfig]) -> Tensor:
    """Attend over many sequences' steps in one layer, each a row of `q`: `[N, H_q, q_len, D_v]`."""
    queries = torch.split(q, 1)
    if len(locks := {id(step.lock): step.lock for step in steps}) > 1:
        raise GeometryError("steps of different layers can't be one batch; attend to each")
    with next(iter(locks.values())):
        rows = zip(steps, queries, configs, strict=True)
        return steps[0].plan.attend([step._call(x, config) for step, x, config in rows])
