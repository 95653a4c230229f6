"""k-means: a codebook for vectors, and the nearest word of each."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.kernels.ops import tree_sum

_CHUNK = 1 << 22
"""Distances that are held at a time."""


def nearest(x: Tensor, words: Tensor) -> Tensor:
    """Return the index of the word nearest to each vector, the same ones in any batch.

    Parameters
    ----------
    x : Tensor
        `[N, n]` fp32.
    words : Tensor
        `[K, n]` fp32.

    Returns
    -------
    Tensor
        `[N]` int64; of equally near words the first.
    """
    offset = tree_sum(words.square()).squeeze(-1) / 2
    parts = []
    for part in torch.split(x, max(_CHUNK // len(words), 1)):
        # Coordinate by coordinate: a matrix product may round differently for other shapes.
        distance = offset.expand(len(part), -1)
        for i in range(words.shape[1]):
            distance = distance - part[:, i : i + 1] * words[:, i]
        parts.append(distance.argmin(-1))
    return torch.cat(parts)


def _distances(x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distance to the nearest word and its index, by matrix products."""
    norms, found = words.square().sum(-1), []
    for part in torch.split(x, max(_CHUNK // len(words), 1)):
        least, index = torch.addmm(norms, part, words.mT, alpha=-2).min(-1)
        found.append(((least + part.square().sum(-1)).clamp(min=0), index))
    return torch.cat([least for least, _ in found]), torch.cat([index for _, index in found])


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    # All weights may be zero, where there are fewer different vectors than words.
    weights = weights.cpu().double() + torch.finfo(torch.float32).tiny
    return torch.multinomial(weights, count, generator=generator)


def _plus_plus(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return the start of Arthur and Vassilvitskii: words drawn by their squared distance.

    Beyond 256 words several are drawn at a time, as in k-means|| (Bahmani et al.).
    """
    x = x[torch.randperm(len(x), generator=generator)[: 16 * size].to(x.device)]
    words = x[:1]
    distance = _distances(x, words)[0]
    while len(words) < size:
        count = min(max(size // 256, 1), size - len(words))
        new = x[_draw(distance, count, generator)]
        distance = torch.minimum(distance, _distances(x, new)[0])
        words = torch.cat([words, new])
    return words


def kmeans(
    x: Tensor, size: int, generator: torch.Generator, steps: int = 50, tolerance: float = 5e-4
) -> Tensor:
    """Fit a codebook: a k-means++ start, then Lloyd's steps until they change nothing.

    Parameters
    ----------
    x : Tensor
        `[N, n]` fp32, N at least `size`.
    size : int
        Words.
    generator : torch.Generator
        On the CPU; the result depends on its state.
    steps : int
        Most steps.
    tolerance : float
        Ends where a step takes less than this share of the error away.

    Returns
    -------
    Tensor
        `[size, n]` fp32.
    """
    words, last = _plus_plus(x, size, generator), float("inf")
    for _ in range(steps):
        distance, index = _distances(x, words)
        error = float(distance.double().sum())
        if last - error <= tolerance * error:
            break
        last = error
        counts = torch.bincount(index, minlength=size)
        sums = torch.zeros_like(words).index_add_(0, index, x)
        words = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], words)
        empty = (counts == 0).nonzero().squeeze(-1)
        if len(empty):
            words[empty] = x[distance.topk(len(empty)).indices]
    return words
