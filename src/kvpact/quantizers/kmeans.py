"""k-means: a codebook for vectors, and the nearest word of each."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import tree_sum

_CHUNK = 1 << 18
"""Distances that are held at a time."""
_MANY_WORDS = 1 << 12
"""More words than that are searched cell by cell, where there are enough vectors."""
_CELLS = 1 << 10


def nearest(x: Tensor, words: Tensor) -> Tensor:
    """Return the index of the word nearest to each vector `[N, n]`, the same ones in any batch.

    Many vectors are searched for among many words cell by cell, which gives the same result.
    """
    if len(words) > _MANY_WORDS and len(x) > _CELLS:
        return _nearest_by_cells(x, words)
    return _scan(x, words)


def _nearest_by_cells(x: Tensor, words: Tensor) -> Tensor:
    """Return what `_scan` does: at distance a from a centre, u from a word, it is within a + u."""
    centres = words[:: len(words) // _CELLS][:_CELLS]
    from_centre, cell = _distances(x, centres)
    homes, order = _groups(_distances(words, centres)[1]), _groups(cell)
    slack, norms = _slack(x, words), words.square().sum(-1)
    result = torch.empty(len(x), dtype=torch.long, device=x.device)
    for centre, home, rows in zip(centres, homes, order, strict=True):
        if not len(rows):
            continue
        least = _distances(x[rows], words[home])[0] if len(home) else from_centre[rows]
        reach = from_centre[rows].sqrt() + (least + slack).sqrt()
        distance = torch.addmv(norms, words, centre, alpha=-2) + centre.square().sum()
        # Few vectors lie far out; they don't make the others look at more words.
        count = len(rows)
        cuts = (count // 2, count - count // 8) if count > 64 else ()
        for part in reach.argsort().tensor_split(cuts):
            limit = reach[part].amax().square() + slack
            candidates = (distance <= limit).nonzero().squeeze(-1)
            result[rows[part]] = candidates[_scan(x[rows[part]], words[candidates])]
    return result


def _groups(cell: Tensor) -> tuple[Tensor, ...]:
    """Return the indices of what is in each cell."""
    counts = torch.bincount(cell, minlength=_CELLS)
    groups: tuple[Tensor, ...] = torch.split(torch.argsort(cell, stable=True), counts.tolist())
    return groups


def _scan(x: Tensor, words: Tensor) -> Tensor:
    norms = words.square().sum(-1)
    slack, parts = _slack(x, words), []
    for part in torch.split(x, max(_CHUNK // len(words), 1)):
        # A matrix product may round differently for other shapes: where that could decide on the
        # word, the distances are computed coordinate by coordinate.
        scores = torch.addmm(norms, part, words.mT, alpha=-2)
        least, index = scores.min(-1)
        second = scores.scatter_(1, index.unsqueeze(-1), torch.inf).amin(-1)
        unsure = (second <= least + slack).nonzero().squeeze(-1)
        if len(unsure):
            index[unsure] = _by_coordinate(part[unsure], words)
        parts.append(index)
    return torch.cat(parts)


def _slack(x: Tensor, words: Tensor) -> Tensor:
    """Return more than the rounding of a squared distance."""
    return 1e-5 * (1 + x.square().sum(-1).amax() + words.square().sum(-1).amax())


def _by_coordinate(x: Tensor, words: Tensor) -> Tensor:
    offset = tree_sum(words.square()).squeeze(-1) / 2
    parts = []
    for part in torch.split(x, max(_CHUNK // len(words), 1)):
        distance = offset.expand(len(part), -1)
        for i in range(words.shape[1]):
            distance = distance - part[:, i : i + 1] * words[:, i]
        parts.append(distance.argmin(-1))
    return torch.cat(parts)


def _distances(x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distance to the nearest word and its index, by matrix products."""
    if len(words) > _MANY_WORDS and len(x) > _CELLS:
        index = _nearest_by_cells(x, words)
        return (x - words[index]).square().sum(-1), index
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

    Beyond 256 words several are drawn at a time (k-means||), beyond 4,096 all the others at once.
    """
    order = torch.randperm(len(x), generator=generator, dtype=torch.int64, device="cpu")
    x = x[order[: 16 * size].to(x.device)]
    words = x[:1]
    distance = _distances(x, words)[0]
    while len(words) < size:
        count = min(max(size // 256, 1), _MANY_WORDS // 256, size - len(words))
        count = size - len(words) if len(words) >= _MANY_WORDS else count
        new = x[_draw(distance, count, generator)]
        distance = torch.minimum(distance, _distances(x, new)[0])
        words = torch.cat([words, new])
    return words


def kmeans(
    x: Tensor, size: int, generator: torch.Generator, steps: int = 50, tolerance: float = 5e-4
) -> Tensor:
    """Fit a codebook `[size, n]` fp32 to `[N, n]`: a k-means++ start, then Lloyd's steps."""
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
