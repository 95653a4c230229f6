"""The cost of errors of stored K and V in KL, to second order, from gradients on one text.

With `p` the exact distribution of a next token and `J` the derivative of its logits with respect to
the stored K and V, an error `d` of these costs `1/2 d' J' (diag p - p p') J d`. A random vector
`r = sqrt(p) x - p (sqrt(p) . x)`, with `x` standard normal, has the covariance `diag p - p p'`. So
a backward pass of `r . logits`, with an `x` for each token, gives gradients `g`, and the mean of
`1/2 (g . d)^2` is the KL summed over the tokens.

Errors of unlike layers and heads are nearly independent, and so are the errors of V of unlike
tokens. So `g . d` is squared head by head for K, and token by token for V; the sum of the squares
is what the *noise* of a layer's K or V costs, and such sums add. (Errors of K of one head may work
in the same direction at all its tokens: weights that are too even, for instance.)

One part of the errors of V is common to all: codes of least square error are shorter than what
they stand for, by a share `a`, so that the outputs of all layers shrink. That costs
`(sum over layers of a w)^2`. `(sum of w)^2` is measured by passes whose stored V are shorter in all
layers, and is shared among the layers as the gradients along V tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpact.evaluate.feed import Steps, chunks, forward
from kvpact.integrations.weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpact.integrations.transformers.attention.seen import Seen

SINKS, WINDOW = 4, 64
"""First tokens, and last ones before a chunk, that are exact, as the candidates have it."""


@dataclass(frozen=True)
class Sensitivity:
    """The effect of errors on a model, on one text.

    Parameters
    ----------
    seen : Seen
        Queries, K and V of all T tokens.
    key, value : mapping
        Layer -> gradients of each chunk but the first, bf16 ``[draws, H_kv, t, D]``, with respect
        to the `t` tokens after the sinks that were stored as codes.
    shrinkage : mapping
        Layer -> `w` of V, in the root of nats.
    scored : int
        Tokens whose logits the gradients are of.
    """

    seen: Seen
    key: Mapping[int, Sequence[Tensor]]
    value: Mapping[int, Sequence[Tensor]]
    shrinkage: Mapping[int, float]
    scored: int

    def noise(self, layer: int, side: str, coded: Tensor) -> Tensor:
        """Return what the errors of one layer's coded K or V cost one by one, in nats per token.

        `side`: ``key`` or ``value``; `coded`: ``[1, H_kv, T, D]``, as a cache holds them. Returns
        ``[2, draws]``: the cost, and what it would be if each token's error in a channel had the
        mean square of all tokens of its head. The latter compares specs on one layer: it varies
        far less between draws, but leaves out how unlike tokens are.
        """
        seen = self.seen.layers[layer]
        error = (coded.float() - (seen.k if side == "key" else seen.v).float())[:, :, SINKS:]
        mean_square = error.square().mean(2)[0]
        found: list[Tensor] = []
        for gradients in getattr(self, side)[layer]:
            scores = (gradients * error[:, :, : gradients.shape[2]]).sum(-1)
            if side == "key":
                scores = scores.sum(2)
            cost = scores.square().flatten(1).sum(1)
            expected = (gradients.float().square().sum(2) * mean_square).sum((1, 2))
            found.append(torch.stack([cost, expected]))
        return torch.stack(found).sum(0) / (2 * self.scored)

    def shrunk(self, layer: int, coded: Tensor) -> float:
        """Return `a w` of one layer's coded V, ``[1, H_kv, T, D_v]``, in the root of nats."""
        exact = self.seen.layers[layer].v[:, :, SINKS:].float()
        error = coded[:, :, SINKS:].float() - exact
        share = -(error * exact).sum() / exact.square().sum().clamp(min=1e-30)
        return float(share) * self.shrinkage[layer]


SHRUNK = 0.05  # share that V are shortened by: small, and far above the rounding of logits
BACKWARD = 1.25  # time of a backward pass, in forward passes over a chunk


def sensitivity_steps(tokens: int, chunk: int, draws: int) -> float:
    """Return the time of `measure_sensitivity`, in forward passes over a chunk."""
    return (-(-tokens // chunk) - 1) * (2 + BACKWARD * draws) + 1


def measure_sensitivity(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    chunk: int = 256,
    draws: int = 3,
    seed: int = 0,
    steps: Steps | None = None,
) -> Sensitivity:
    """Feed tokens as `evaluate` does, exactly, and measure what errors of the past would cost.

    `token_ids`: int64 ``[N]``, more than a chunk, of which the first is left out; `draws`: random
    vectors, and backward passes, for each chunk; `steps`: called with `sensitivity_steps`. A model
    whose attention can't be seen is a `KVPactError` (see `seen_attention`).
    """
    from transformers import DynamicCache

    from kvpact.integrations.transformers.attention.seen import seen_attention

    steps = steps or Steps(None, 0)
    cache: Any = DynamicCache(config=model.config)
    random = torch.Generator(input_device(model)).manual_seed(seed)
    sums = _Sums()
    queries: dict[int, list[Tensor]] = {}
    with seen_attention(model) as seen:
        for start, ids, _ in chunks(token_ids.to(input_device(model)), chunk):
            stored = _Stored(slice(SINKS, max(start - WINDOW, SINKS)))
            before = deepcopy(cache) if start else None
            seen.read = stored.watched if start else None
            with torch.set_grad_enabled(start > 0):
                logits = forward(model, ids, cache)
            steps.done(f"a pass at token {start}")
            seen.check()
            for layer, x in seen.layers.items():
                queries.setdefault(layer, []).append(x.q)
            exact = dict(seen.layers)
            if before is not None:
                weights = logits.detach().float().softmax(-1)
                for draw in range(draws):
                    stored.backward(logits, _direction(weights, random), draw + 1 < draws)
                    steps.done(f"gradients at token {start}", BACKWARD)
                sums.add(stored)
                seen.read = stored.shortened
                with torch.no_grad():
                    change = forward(model, ids, before).float() - logits.float()
                sums.shrunk += float(_half_variance(weights, change)) / SHRUNK**2
                sums.scored += len(ids)
                steps.done(f"shorter values at token {start}")
            _detach(cache)
    seen.read = None
    seen.layers = {i: x._replace(q=torch.cat(queries[i], 2)) for i, x in sorted(exact.items())}
    return sums.sensitivity(seen)


class _Stored:
    """The past that layers attend to in one chunk; a cache would code the tokens `coded`."""

    def __init__(self, coded: slice) -> None:
        self.coded = coded
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: list[dict[int, tuple[Tensor, Tensor]]] = []

    def watched(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Let gradients of coded tokens be taken."""
        coded_k, coded_v = (x[:, :, self.coded].detach().clone().requires_grad_() for x in (k, v))
        self.leaves[layer] = coded_k, coded_v
        return self._with(k, coded_k), self._with(v, coded_v)

    def shortened(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Shorten coded V."""
        return k, self._with(v, v[:, :, self.coded] * (1 - SHRUNK))

    def _with(self, x: Tensor, coded: Tensor) -> Tensor:
        return torch.cat([x[:, :, : self.coded.start], coded, x[:, :, self.coded.stop :]], 2)

    def backward(self, logits: Tensor, direction: Tensor, again: bool) -> None:
        """Add to `gradients` those of the logits in one direction."""
        flat = [x for pair in self.leaves.values() for x in pair]
        found = torch.autograd.grad(
            logits, flat, direction.to(logits.dtype), retain_graph=again, materialize_grads=True
        )
        pairs = zip(found[::2], found[1::2], strict=True)
        self.gradients.append(dict(zip(self.leaves, pairs, strict=True)))


class _Sums:
    """The sums kept of chunks."""

    def __init__(self) -> None:
        self._key: dict[int, list[Tensor]] = {}
        self._value: dict[int, list[Tensor]] = {}
        self._along: dict[int, float] = {}
        self.shrunk, self.scored = 0.0, 0

    def add(self, stored: _Stored) -> None:
        """Add the gradients of one chunk."""
        for layer, leaves in stored.leaves.items():
            pairs = [pairs[layer] for pairs in stored.gradients]
            for kept, side in ((self._key, 0), (self._value, 1)):
                kept.setdefault(layer, []).append(torch.cat([x[side] for x in pairs]).bfloat16())
            along = (self._value[layer][-1].float() * leaves[1].detach().float()).sum((1, 2, 3))
            self._along[layer] = self._along.get(layer, 0.0) + float(along.square().sum())

    def sensitivity(self, seen: Seen) -> Sensitivity:
        """Return the sums over all chunks, as means over the scored tokens where they are KLs."""
        roots = {layer: x**0.5 for layer, x in self._along.items()}
        whole = sum(roots.values()) or 1.0
        total = (self.shrunk / self.scored) ** 0.5
        shrinkage = {layer: total * x / whole for layer, x in roots.items()}
        return Sensitivity(seen, _tuples(self._key), _tuples(self._value), shrinkage, self.scored)


def _tuples(kept: dict[int, list[Tensor]]) -> dict[int, tuple[Tensor, ...]]:
    return {layer: tuple(kept[layer]) for layer in sorted(kept)}


def _direction(weights: Tensor, random: torch.Generator) -> Tensor:
    """Return a vector a row, ``[S, V]``, of the covariance ``diag p - p p'``."""
    drawn = torch.empty_like(weights).normal_(generator=random) * weights.sqrt()
    return drawn - weights * drawn.sum(-1, keepdim=True)


def _half_variance(weights: Tensor, change: Tensor) -> Tensor:
    """Return half the variance of changes of logits, summed over rows: their KL to second order."""
    mean = (weights * change).sum(-1, keepdim=True)
    return (weights * (change - mean).square()).sum() / 2


def _detach(cache: Any) -> None:
    """Cut a cache off the graph of the chunk that filled it."""
    for layer in cache.layers:
        vars(layer).update({name: _detached(x) for name, x in vars(layer).items()})


def _detached(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _detached(y) for name, y in x.items()}
    return x.detach() if isinstance(x, Tensor) else x
