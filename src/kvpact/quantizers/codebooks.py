"""Codebooks for N(0, 1), 1 to 8 bits: scalar quantisers of (nearly) least distortion.

Up to 6 bits a level is a whole number of 8 bits, `n` from -127 to 127, times a unit `u` that the
codebook has: among all such levels those of least distortion. Products with codes are then exact in
8-bit integers, and the same table serves every arithmetic. A unit is a number of fp16, so levels
and boundaries (the midpoints of levels) are exact in fp32. From 7 bits on whole numbers cost too
much (10 % more distortion at 7 bits; 8 bits have more levels than there are such numbers), and so
long a table fits into no register: these are the Lloyd-Max codebooks (Lloyd 1982, Max 1960), whose
levels are the means of their cells.

========  ==================  ===============  =========
bits      unit                E(x - level)^2   above the least possible (Lloyd-Max)
========  ==================  ===============  =========
1         1634 / 2^11         .3633802         0 %
2         1237 / 2^14         .1174819         .0001 %
3         1602 / 2^16         .0345486         .0024 %
4         1718 / 2^16         .0095062         .055 %
5         1102 / 2^15         .0025192         .58 %
6         1154 / 2^15         .0006567         1.93 %
7                             .0001635         0 %
8                             .0000412         0 %
========  ==================  ===============  =========

A coordinate of a randomly rotated unit vector of width d, times sqrt(d), is so close to N(0, 1)
that the exact (Beta) codebook differs by .1 to .4 % in distortion. The levels are constants, not
computed at run time, so that codes are the same bytes everywhere; tests check them against the
density.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Codebook(NamedTuple):
    """Ascending levels, in units: whole numbers up to 6 bits; from 7 bits on `unit` is 1."""

    levels: tuple[float, ...]
    unit: float


# The units and the positive levels; codebooks are symmetric.
_UNITS = {
    1: 1634 / 2**11,
    2: 1237 / 2**14,
    3: 1602 / 2**16,
    4: 1718 / 2**16,
    5: 1102 / 2**15,
    6: 1154 / 2**15,
}
# fmt: off
_POSITIVE_LEVELS: dict[int, tuple[float, ...]] = {
    1: (1,),
    2: (6, 20),
    3: (10, 31, 55, 88),
    4: (5, 15, 25, 36, 48, 62, 79, 104),
    5: (2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97),
    6: (
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 38, 41, 44, 47, 50, 53, 57, 61, 65, 70, 76, 83, 92, 106,
    ),
    7: (
        0.0168282, 0.0504909, 0.0841726, 0.1178863, 0.1516446, 0.1854607, 0.2193476, 0.2533187,
        0.2873876, 0.3215679, 0.3558740, 0.3903203, 0.4249216, 0.4596934, 0.4946515, 0.5298122,
        0.5651927, 0.6008105, 0.6366843, 0.6728333, 0.7092778, 0.7460391, 0.7831396, 0.8206030,
        0.8584542, 0.8967200, 0.9354285, 0.9746100, 1.0142967, 1.0545232, 1.0953267, 1.1367474,
        1.1788286, 1.2216174, 1.2651651, 1.3095276, 1.3547663, 1.4009486, 1.4481489, 1.4964500,
        1.5459437, 1.5967331, 1.6489339, 1.7026770, 1.7581114, 1.8154077, 1.8747625, 1.9364046,
        2.0006018, 2.0676715, 2.1379934, 2.2120275, 2.2903392, 2.3736343, 2.4628114, 2.5590405,
        2.6638865, 2.7795143, 2.9090471, 3.0572462, 3.2319332, 3.4474303, 3.7349366, 4.1896942,
    ),
    8: (
        0.0084462, 0.0253394, 0.0422350, 0.0591346, 0.0760399, 0.0929524, 0.1098737, 0.1268056,
        0.1437496, 0.1607073, 0.1776805, 0.1946707, 0.2116798, 0.2287092, 0.2457608, 0.2628362,
        0.2799372, 0.2970656, 0.3142230, 0.3314114, 0.3486324, 0.3658880, 0.3831800, 0.4005102,
        0.4178806, 0.4352932, 0.4527499, 0.4702527, 0.4878036, 0.5054048, 0.5230583, 0.5407663,
        0.5585310, 0.5763547, 0.5942396, 0.6121881, 0.6302026, 0.6482855, 0.6664394, 0.6846668,
        0.7029703, 0.7213526, 0.7398166, 0.7583650, 0.7770008, 0.7957270, 0.8145467, 0.8334630,
        0.8524793, 0.8715989, 0.8908253, 0.9101621, 0.9296130, 0.9491818, 0.9688726, 0.9886894,
        1.0086364, 1.0287182, 1.0489392, 1.0693042, 1.0898181, 1.1104860, 1.1313133, 1.1523054,
        1.1734682, 1.1948076, 1.2163300, 1.2380418, 1.2599499, 1.2820615, 1.3043840, 1.3269253,
        1.3496937, 1.3726976, 1.3959463, 1.4194493, 1.4432166, 1.4672587, 1.4915870, 1.5162131,
        1.5411497, 1.5664098, 1.5920076, 1.6179578, 1.6442765, 1.6709804, 1.6980875, 1.7256170,
        1.7535894, 1.7820269, 1.8109531, 1.8403933, 1.8703751, 1.9009281, 1.9320842, 1.9638784,
        1.9963485, 2.0295357, 2.0634852, 2.0982465, 2.1338741, 2.1704282, 2.2079755, 2.2465899,
        2.2863545, 2.3273619, 2.3697171, 2.4135387, 2.4589621, 2.5061426, 2.5552594, 2.6065215,
        2.6601740, 2.7165076, 2.7758707, 2.8386858, 2.9054729, 2.9768821, 3.0537420, 3.1371325,
        3.2285002, 3.3298485, 3.4440717, 3.5755880, 3.7316663, 3.9256378, 4.1865954, 4.6035356,
    ),
}
# fmt: on


@lru_cache(maxsize=8)
def codebook(bits: int) -> Codebook:
    """Return the codebook of 1 to 8 bits."""
    positive = tuple(float(level) for level in _POSITIVE_LEVELS[bits])
    negative = tuple(-level for level in reversed(positive))
    return Codebook(negative + positive, _UNITS.get(bits, 1.0))


@lru_cache(maxsize=64)
def levels(bits: int | Codebook, device: torch.device) -> Tensor:
    """Return the levels of a codebook (or of that of so many bits), ascending, fp32."""
    book = codebook(bits) if isinstance(bits, int) else bits
    return (torch.tensor(book.levels, dtype=torch.float32, device="cpu") * book.unit).to(device)


@lru_cache(maxsize=64)
def boundaries(bits: int | Codebook, device: torch.device) -> Tensor:
    """Return the `2**bits - 1` boundaries between the cells, ascending, fp32."""
    points = levels(bits, torch.device("cpu"))
    return ((points[1:] + points[:-1]) / 2).to(device)


def assign(x: Tensor, bits: int | Codebook) -> Tensor:
    """Return the code of the level nearest to each value, uint8, same shape."""
    return torch.bucketize(x, boundaries(bits, x.device)).to(torch.uint8)


def lookup(codes: Tensor, bits: int | Codebook) -> Tensor:
    """Return the level of each code, fp32, same shape."""
    return levels(bits, codes.device)[codes.to(torch.int32)]
