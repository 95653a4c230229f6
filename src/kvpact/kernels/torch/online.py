"""Softmax over tokens that arrive in tiles (Milakov and Gimelshein, arXiv:1805.02867)."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """Accumulates `softmax(logits) @ values` over tiles.

    Values come in two spaces, as they are and transformed; each has an accumulator of its own, and
    the transform is undone once, at the end.

    `rows`: leading shape of the logits, `[B, H_kv, R]` with R rows of queries; `sink_logits`:
    `[B or 1, H_kv, R]`: one more logit per row without a value.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        dim: int,
        device: torch.device,
        sink_logits: Tensor | None = None,
    ) -> None:
        self.peak = torch.full((*rows, 1), -torch.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(*rows, 1, dtype=torch.float32, device=device)
        if sink_logits is not None:
            self.peak = sink_logits.to(device, torch.float32).expand(rows).unsqueeze(-1).clone()
            self.total = torch.ones_like(self.total)
        self._exact = torch.zeros(*rows, dim, dtype=torch.float32, device=device)
        self._transformed = torch.zeros(*rows, dim, dtype=torch.float32, device=device)

    def add(self, logits: Tensor, values: Tensor, transformed: bool) -> None:
        """Take a tile in.

        `logits`: `[B, H_kv, R, t]` fp32, -inf where a token may not be seen; overwritten. `values`:
        `[B, H_kv, t, D_v]`.
        """
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        # A row that has seen no token yet keeps a peak of -inf; 0 stands in for it, so that
        # exp(-inf - 0) is 0 and not NaN.
        safe = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
        decay = torch.exp(self.peak - safe)
        weights = logits.sub_(safe).exp_()
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self._exact *= decay
        self._transformed *= decay
        accumulator = self._transformed if transformed else self._exact
        accumulator += weights @ values.to(torch.float32)
        self.peak = peak

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the two parts, exact and transformed; zero for rows that saw no token."""
        total = torch.where(self.total == 0, torch.ones_like(self.total), self.total)
        return self._exact / total, self._transformed / total
