"""PolarQuant (Han, Kacham, Karbasi, Mirrokni, Zandieh, arXiv:2502.02617): recursive polar angles.

Rotate, `y = R x`. Level 1 turns pairs of channels into a radius and an angle in [0, 2 pi); each
further level l turns pairs of radii `(r, s)` into the radius `sqrt(r^2 + s^2)` and the angle
`atan(s / r)` in [0, pi/2]. The radii of the last level are stored in fp16. The angles of normal
coordinates are independent: those of level 1 are uniform, those of level l have the density
`~ sin^(2^(l-1) - 1)(2 angle)`. So level 1 has `first` bits, for equal sectors, and every other
level the 2-bit Lloyd-Max codebook of its density; no scale and no zero are needed. A last channel
or radius without a partner is stored in fp16 as it is, so any width will do.

Bits per value where 2^levels divides the width: first/2 + 2 (1/4 + … + 1/2^levels) + 16/2^levels.
The paper's setting, ``first=4,levels=4``, is the default and takes 3.875.

Another PolarQuant of the same year (arXiv:2502.00527), which quantises channel pairs of K over
groups of tokens, is a different method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.arithmetic import square_root
from kvpact.formats import CodesField, Order, TokenField
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard

# Lloyd-Max levels of 2 bits for the density of levels 2 to 6: pi/4 plus and minus these. Constants
# for the reason given in `quantizers.codebooks`; a test derives them again.
_OFFSETS = {
    2: (0.1514179, 0.4756420),
    3: (0.1110132, 0.3591485),
    4: (0.0794888, 0.2611841),
    5: (0.0564453, 0.1868949),
    6: (0.0399745, 0.1328576),
}
_WORD = 32


def codebook(level: int, first: int) -> tuple[list[float], list[float]]:
    """Return the angles of a level's codes and their boundaries; `first`: bits of level 1."""
    if level == 1:
        width = 2 * math.pi / 2**first
        angles = [width * (code + 0.5) for code in range(2**first)]
        return angles, [width * code for code in range(1, 2**first)]
    near, far = _OFFSETS[level]
    angles = [math.pi / 4 + offset for offset in (-far, -near, near, far)]
    middle = (near + far) / 2
    return angles, [math.pi / 4 + offset for offset in (-middle, 0.0, middle)]


@lru_cache(maxsize=64)
def _directions(level: int, first: int, inner: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of a level's angles, or of its boundaries up to pi (`inner`)."""
    points, boundaries = codebook(level, first)
    if inner:
        points = [0.0, *boundaries]
        points = points[: len(points) // 2] if level == 1 else points
    cosines = torch.tensor([math.cos(point) for point in points], dtype=torch.float32, device="cpu")
    sines = torch.tensor([math.sin(point) for point in points], dtype=torch.float32, device="cpu")
    return cosines.to(device), sines.to(device)


def _assign(x: Tensor, y: Tensor, level: int, first: int) -> Tensor:
    """Return the code of the angle of each `(x, y)`, uint8.

    No arc tangent, which may round differently from device to device: a point is past a boundary b
    where `y cos b - x sin b` is positive; points below the x axis, turned by pi, get the other half
    of codes.
    """
    cosines, sines = _directions(level, first, True, x.device)
    code = torch.zeros_like(x, dtype=torch.int32)
    below = y < 0
    if level == 1:
        x, y = torch.where(below, -x, x), y.abs()
    step = len(cosines) // 2
    while step:
        further = code + step
        code = torch.where(y * cosines[further] > x * sines[further], further, code)
        step //= 2
    if level == 1:
        code = torch.where(below, code + len(cosines), code)
    return code.to(torch.uint8)


class PolarCodec(Codec):
    """One stream. `dim`, `levels`, `first`, `seed`: as in `PolarQuant`."""

    def __init__(self, dim: int, levels: int, first: int, order: Order, seed: int = 0) -> None:
        self._dim, self._first = dim, first
        self.transform = RandomHadamard(dim, seed)
        self._pairs: list[int] = []  # angles of each level
        self._left: list[bool] = []  # whether a level leaves one without a partner
        nodes = dim
        while len(self._pairs) < levels and nodes > 1:
            self._left.append(nodes % 2 == 1)
            nodes //= 2
            self._pairs.append(nodes)
        fields = []
        for level, pairs in enumerate(self._pairs, 1):
            bits = first if level == 1 else 2
            # The few codes of the upper levels would leave words of one token partly empty.
            filled = pairs * bits % _WORD == 0
            fields.append(CodesField(f"angles{level}", bits, pairs, order if filled else "channel"))
        self.fields = (*fields, TokenField("radii", nodes + sum(self._left)))

    @staticmethod
    def _unit(level: int) -> float:
        """About the square root of what a radius is made of: its fp16 reaches as far as x's."""
        return float(2 ** (level // 2))

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, then pair channels, and radii, level by level."""
        nodes = self.transform.forward(x)
        out, radii = {}, []
        for level, (pairs, left) in enumerate(zip(self._pairs, self._left, strict=True), 1):
            if left:
                radii.append(nodes[..., -1:] / self._unit(level - 1))
            both = torch.unflatten(nodes[..., : 2 * pairs], -1, (-1, 2))
            r, s = both[..., 0], both[..., 1]
            out[f"angles{level}"] = _assign(r, s, level, self._first)
            nodes = square_root(r.square() + s.square())
        radii.append(nodes / self._unit(len(self._pairs)))
        out["radii"] = half(torch.cat(radii, dim=-1), "radius of a token")
        return out

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        radii = arrays["radii"].to(torch.float32)
        left = sum(self._left)
        nodes = radii[..., left:] * self._unit(len(self._pairs))
        for level in range(len(self._pairs), 0, -1):
            codes = arrays[f"angles{level}"].to(torch.int32)
            cosines, sines = _directions(level, self._first, False, codes.device)
            nodes = torch.stack((nodes * cosines[codes], nodes * sines[codes]), dim=-1).flatten(-2)
            if self._left[level - 1]:
                left -= 1
                last = radii[..., left : left + 1] * self._unit(level - 1)
                nodes = torch.cat([nodes, last], dim=-1)
        return nodes


@dataclass(frozen=True, kw_only=True)
class PolarQuant(Method):
    """Random rotation, then recursive polar coordinates: quantised angles and fp16 radii.

    Parameters
    ----------
    levels : int
        1 to 6; one radius is stored for 2^levels channels.
    first : int
        Bits of an angle of level 1, 1 to 8; those of other levels have 2.
    seed : int
        Chooses the rotation's signs.

    Examples
    --------
    >>> codec = make_codec(PolarQuant(), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'angles1': [13, 9, 8, 12], 'angles2': [1, 2], 'angles3': [1], 'radii': [6.0]}
    """

    name: ClassVar[str] = "polarquant"
    paper: ClassVar[str] = "arXiv:2502.02617"
    examples: ClassVar[Mapping[str, float]] = {"polarquant": 0.187}
    variants: ClassVar[Mapping[str, float]] = {
        "polarquant:levels=6,first=3,sinks=0,window=0": 0.277,
        "polarquant:levels=1,first=6/polarquant:levels=5": 0.187,
    }
    levels: int = 4
    first: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("levels", range(1, 7))
        self.check_choice("first", range(1, 9))

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values."""
        return PolarCodec(dim, self.levels, self.first, order, self.seed)
