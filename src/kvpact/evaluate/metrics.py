"""Per-token scores of one model output against the exact one, and their summary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_BLOCK = 32  # rows turned to float64 at a time: 12 MB per copy at a vocabulary of 49,152


@dataclass(frozen=True)
class TokenScores:
    """Scores of the same tokens under the reference and under a candidate.

    Parameters
    ----------
    ref_nll, nll : Tensor
        Negative log-likelihood of the true next token in nats, float64 ``[T]``.
    kl : Tensor
        KL(reference || candidate) of the next-token distributions in nats, float64 ``[T]``.
    agree : Tensor
        Whether both put the same token first, bool ``[T]``.
    """

    ref_nll: Tensor
    nll: Tensor
    kl: Tensor
    agree: Tensor


def score_tokens(ref_logits: Tensor, logits: Tensor, targets: Tensor) -> TokenScores:
    """Compare next-token logits with the reference's, row by row.

    Parameters
    ----------
    ref_logits, logits : Tensor
        ``[T, V]``, any floating-point dtype; computed in float64, `ROW_BLOCK` rows at a time.
    targets : Tensor
        The true next tokens, int64 ``[T]``; other shapes are a `ValueError`.
    """
    if ref_logits.shape != logits.shape or logits.shape[:-1] != targets.shape or logits.ndim != 2:
        raise ValueError(
            f"logits {tuple(logits.shape)}, reference {tuple(ref_logits.shape)} and targets "
            f"{tuple(targets.shape)} should be [T, V], [T, V] and [T]"
        )
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for start in range(0, max(len(targets), 1), ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        ref = torch.log_softmax(ref_logits[rows].double(), dim=-1)
        log_p = torch.log_softmax(logits[rows].double(), dim=-1)
        target = targets[rows].unsqueeze(-1)
        agree = ref.argmax(-1) == log_p.argmax(-1)
        ref_nll, nll = (-x.gather(-1, target).squeeze(-1) for x in (ref, log_p))
        # A KL is never negative; rounding can make equal rows -1e-17.
        kl = (ref.exp() * log_p.neg_().add_(ref)).sum(-1).clamp_(min=0)
        parts.append((ref_nll, nll, kl, agree))
    return TokenScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of ``[N]`` values and its standard error, NaN for fewer than two."""
    count = len(values)
    spread = values.std(correction=1).item() if count > 1 else math.nan
    return values.mean().item(), spread / math.sqrt(max(count, 1))


class MetricAccumulator:
    """Collects the scores of chunk after chunk; a few numbers a token are kept."""

    def __init__(self) -> None:
        self._parts: list[TokenScores] = []

    def add(self, scores: TokenScores) -> None:
        """Add the scores of further tokens."""
        self._parts.append(scores)

    def scores(self) -> TokenScores:
        """Return the scores of all tokens added, in their order."""
        empty = torch.zeros(0, dtype=torch.float64, device="cpu")
        columns = {
            name: torch.cat([getattr(part, name) for part in self._parts] or [empty])
            for name in ("ref_nll", "nll", "kl", "agree")
        }
        return TokenScores(**columns)

    def summary(self) -> dict[str, float]:
        """Return fields of `EvalRow` over everything added, and ``reference_perplexity``."""
        all_scores = self.scores()
        ref, nll, kl = all_scores.ref_nll, all_scores.nll, all_scores.kl
        if not len(nll):
            raise ValueError("no token was scored")
        difference, log_ratio_se = mean_and_error(nll - ref)
        kl_mean, kl_se = mean_and_error(kl)
        return {
            "perplexity": nll.mean().exp().item(),
            "reference_perplexity": ref.mean().exp().item(),
            "perplexity_change": 100 * math.expm1(difference),
            "perplexity_change_se": 100 * math.exp(difference) * log_ratio_se,  # first order
            "kl_mean": kl_mean,
            "kl_se": kl_se,
            "kl_median": kl.quantile(0.5).item(),
            "kl_p99": kl.quantile(0.99).item(),
            "kl_max": kl.max().item(),
            "top1": 100 * all_scores.agree.double().mean().item(),
        }
