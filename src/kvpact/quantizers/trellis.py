"""Trellis-coded quantisation (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990), 1 to 6 bits.

A vector of D numbers takes D coded bits u_i and k - 1 point bits p_i for each number. The coded
bits run through one of Ungerboeck's codes in feed-forward form, whose register begins as it ends
(tail-biting: the index i of u is meant modulo D)::

    8 states:   c1_i = u_i ^ u_{i-1} ^ u_{i-3}    c0_i = u_{i-2}
    16 states:  c1_i = u_i ^ u_{i-1} ^ u_{i-4}    c0_i = u_{i-2}

    index_i = 4 p_i + 2 c1_i + c0_i               number_i ~ levels[index_i]

So k bits choose among 2^(k+1) levels, and the Viterbi algorithm finds the least square error. A
code is `2 p + u`. Nothing runs from number to number in decoding: an index needs five coded bits.

The levels are whole numbers of 8 bits, so that integer and floating-point kernels share one table;
`UNITS` makes them those of N(0, 1). They were found with the generalised Lloyd algorithm on
vectors of 64 normal numbers, then rounded to the whole numbers of least distortion. Mean square
error on such vectors, 16 states (k = 1 to 6): .2957, .0827, .0225, .0062, .0017, .00045; Lloyd-Max
has .363, .1175, .0345, .0095, .0025, .00064.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

# fmt: off
_POSITIVE_LEVELS: dict[int, tuple[int, ...]] = {
    1: (17, 64),
    2: (12, 39, 70, 122),
    3: (4, 13, 22, 32, 43, 56, 74, 102),
    4: (2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 74, 85, 100, 122),
    5: (
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 26, 28, 30, 33,
        35, 38, 40, 43, 46, 49, 52, 55, 59, 63, 68, 73, 79, 85, 94, 107,
    ),
    6: (
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
        17, 18, 19, 20, 21, 22, 24, 25, 26, 27, 28, 29, 30, 32, 33, 34,
        35, 37, 38, 39, 41, 42, 44, 45, 46, 48, 49, 51, 53, 54, 56, 58,
        60, 62, 64, 67, 69, 71, 74, 77, 80, 84, 87, 92, 97, 103, 112, 127,
    ),
}
# fmt: on
UNITS = {1: 0.0188485, 2: 0.0151398, 3: 0.0242000, 4: 0.0256291, 5: 0.0332530, 6: 0.0330904}
"""One step of the levels of k bits, for numbers with a mean square of 1."""

STATES = (8, 16)
LEAST = 8
"""Numbers of the shortest vector: shorter ones are filled up with zeros."""
SHORT = 32
"""Vectors with fewer numbers have 8 states, and each of them is tried as the first one."""

CELLS = 256
"""Cells of half a step on each side of zero that `cells` covers; all levels are within."""

_MEMORY = {8: 3, 16: 4}
_AT_A_TIME = 1 << 20
"""Numbers that are encoded together; more would take gigabytes."""
_FAR = 1e30


@lru_cache(maxsize=64)
def levels(bits: int, device: torch.device) -> Tensor:
    """Return the `2**(bits + 1)` levels, ascending whole numbers, fp32."""
    positive = torch.tensor(_POSITIVE_LEVELS[bits], dtype=torch.float32, device="cpu")
    return torch.cat([-positive.flip(0), positive]).to(device)


def subset(window: int, states: int) -> int:
    """Return 2 c1 + c0 of the last coded bits, u_i the lowest bit."""
    memory = _MEMORY[states]
    c1 = window ^ window >> 1 ^ window >> memory
    return 2 * (c1 & 1) + (window >> 2 & 1)


def indices(codes: Tensor, states: int) -> Tensor:
    """Return the index of each code's level, `[..., D]` uint8, in the order of the trellis."""
    u = codes & 1
    c1 = u ^ u.roll(1, -1) ^ u.roll(_MEMORY[states], -1)
    return (codes >> 1) * 4 + c1 * 2 + u.roll(2, -1)


def lookup(codes: Tensor, bits: int, states: int) -> Tensor:
    """Return the level of each code, fp32, same shape."""
    return levels(bits, codes.device)[indices(codes, states).to(torch.int32)]


def encode(z: Tensor, bits: int, states: int) -> Tensor:
    """Return the uint8 codes `[..., D]` of least square error of `z`, in steps of the levels.

    The first and the last state have to be equal: a first pass from the middle of the vector finds
    the state that the second one begins and ends with, at 16 states and 64 numbers within .7 % of
    the best. Of vectors with less than `SHORT` numbers every state is tried. Costs are added up in
    fp32 number by number, ties take the lower index: the bytes are the same in any batch and on any
    machine.
    """
    flat = z.reshape(-1, z.shape[-1])
    most = max(_AT_A_TIME // flat.shape[1], 1)
    parts = [part.mT.contiguous() for part in torch.split(flat, most)]
    codes = [_search(*_nearest(part, bits), states) for part in parts]
    return torch.cat(codes).reshape(z.shape) if codes else torch.empty_like(z, dtype=torch.uint8)


def encode_mixed(y: Tensor, bits: Sequence[int], importance: Tensor, states: int) -> Tensor:
    """Return the codes of least weighted square error of `[..., D]` numbers with unlike `bits`."""
    flat = y.reshape(-1, y.shape[-1])
    most = max(_AT_A_TIME // flat.shape[1], 1)
    codes, same = [], runs(bits)
    counts = [count for count, _ in same]
    for part in torch.split(flat, most):
        found = []
        columns = torch.split(part.mT.contiguous(), counts)
        weights = torch.split(importance, counts)
        for z, weight, (_, k) in zip(columns, weights, same, strict=True):
            distances, points = _nearest(z * (1 / UNITS[k]), k)
            found.append((distances * (weight * UNITS[k] ** 2).view(-1, 1, 1), points))
        distances, points = (torch.cat(parts) for parts in zip(*found, strict=True))
        codes.append(_search(distances, points, states))
    return torch.cat(codes).reshape(y.shape) if codes else torch.empty_like(y, dtype=torch.uint8)


def lookup_mixed(codes: Tensor, bits: Sequence[int], states: int) -> Tensor:
    """Return the numbers that `encode_mixed` chose, fp32 `[..., D]`."""
    same = runs(bits)
    which = torch.split(indices(codes, states).to(torch.int32), [count for count, _ in same], -1)
    found = [levels(k, codes.device)[x] * UNITS[k] for x, (_, k) in zip(which, same, strict=True)]
    return torch.cat(found, -1)


def runs(bits: Sequence[int]) -> list[tuple[int, int]]:
    """Return how many numbers in a row have how many bits."""
    return [(len(list(same)), width) for width, same in groupby(bits)]


def nearest_points(z: Tensor, bits: int) -> Tensor:
    """Return the nearest points of the four subsets of `z` `[D, N]`: `[D, 4, N]` uint8."""
    of_subset = levels(bits, z.device).view(-1, 4).T
    middles = ((of_subset[:, 1:] + of_subset[:, :-1]) / 2).contiguous()
    points = [torch.bucketize(z, row, out_int32=True) for row in middles]
    return torch.stack(points, 1).to(torch.uint8)


@lru_cache(maxsize=8)
def cells(bits: int) -> Tensor:
    """Return levels and points nearest to numbers by their half steps, for kernels: int32, CPU.

    Points change at whole and half steps alone. Cell i has the numbers above `(i - 1) / 2` and up
    to `i / 2`, counted from the first one's end at `-CELLS / 2`; of each subset a byte of the word.
    """
    cpu = torch.device("cpu")
    ends = torch.arange(-CELLS, CELLS + 1, dtype=torch.float32, device=cpu) / 2
    points = nearest_points(ends.view(-1, 1), bits)[:, :, 0]
    nearest = levels(bits, cpu).view(-1, 4).T.gather(1, points.T.long()).T
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device="cpu")
    words = [(x.to(torch.int64) & 0xFF) << shifts for x in (nearest, points)]
    return torch.stack([x.sum(-1) for x in words]).to(torch.int32)


def _nearest(z: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return distances and numbers of the nearest points of the four subsets, `[D, 4, N]`."""
    points = nearest_points(z, bits)
    subsets = torch.arange(4, dtype=torch.int32, device=z.device).view(4, 1)
    which = points.to(torch.int32) * 4 + subsets
    return (z.unsqueeze(1) - levels(bits, z.device)[which]).square(), points


class _Trellis:
    """Passes of the Viterbi algorithm over vectors `[D, 4, N]` of distances."""

    def __init__(self, distances: Tensor, states: int) -> None:
        device = distances.device
        self.distances, self.states, self.memory = distances, states, _MEMORY[states]
        subsets = [subset(window, states) for window in range(2 * states)]
        self.subsets = torch.tensor(subsets, dtype=torch.int64, device=device)

    def run(self, order: list[int], cost: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the costs of the states `[S, N]` at the end, and who came from `high`."""
        back = []
        half = self.states // 2
        for i in order:
            # A state s is reached from s >> 1 and from that with the oldest bit set, whose costs
            # are in the first and in the second half; so are the subsets of the two windows.
            distance = self.distances[i].index_select(0, self.subsets)
            low, high = cost.view(2, half, 1, -1) + distance.view(2, half, 2, -1)
            back.append((high < low).flatten(0, 1))
            cost = torch.where(back[-1], high.flatten(0, 1), low.flatten(0, 1))
        return cost, back

    def window(self, state: Tensor, back: Tensor) -> Tensor:
        """Return the window that led to `state`, `[N]`; the state before it is its higher bits."""
        oldest = back.gather(0, state.unsqueeze(0)).squeeze(0).to(torch.int64)
        return state | oldest << self.memory


def states_of(dim: int, states: int) -> int:
    """Return the states of a trellis over vectors of a width, `states` being those of long ones."""
    return states if dim >= SHORT else STATES[0]


def _search(distances: Tensor, points: Tensor, states: int) -> Tensor:
    """Return the codes `[N, D]` of the cheapest path over `[D, 4, N]`."""
    size, _, count = distances.shape
    trellis = _Trellis(distances, states)
    state = _best_end(trellis) if size < SHORT else _likely_end(trellis)
    cost = distances.new_full((states, count), _FAR).scatter_(0, state.unsqueeze(0), 0.0)
    _, back = trellis.run([*range(size)], cost)
    codes = torch.empty(size, count, dtype=torch.uint8, device=distances.device)
    for i in reversed(range(size)):
        window = trellis.window(state, back[i])
        which = trellis.subsets[window].unsqueeze(0)
        codes[i] = 2 * points[i].gather(0, which).squeeze(0) + (state & 1)
        state = window >> 1
    return codes.mT.contiguous()


def _likely_end(trellis: _Trellis) -> Tensor:
    """Return the state before the first number on the best path around it, `[N]` int64."""
    size, _, count = trellis.distances.shape
    half = size // 2
    order = [*range(half, size), *range(half)]
    cost, back = trellis.run(order, trellis.distances.new_zeros(trellis.states, count))
    state = _cheapest(cost)
    for step in reversed(range(size - half, size)):
        state = trellis.window(state, back[step]) >> 1
    return state


def _best_end(trellis: _Trellis) -> Tensor:
    """Return the state that the best of all paths begins and ends with, `[N]` int64."""
    size, _, count = trellis.distances.shape
    ends = []
    for state in range(trellis.states):
        cost = trellis.distances.new_full((trellis.states, count), _FAR)
        cost[state] = 0.0
        cost, _ = trellis.run([*range(size)], cost)
        ends.append(cost[state])
    return _cheapest(torch.stack(ends))


def _cheapest(cost: Tensor) -> Tensor:
    """Return the state of least cost, `[N]` int64; the lowest one of equals."""
    best, state = cost[0], torch.zeros_like(cost[0], dtype=torch.int64)
    for other in range(1, len(cost)):
        closer = cost[other] < best
        best = torch.where(closer, cost[other], best)
        state = torch.where(closer, other, state)
    return state
