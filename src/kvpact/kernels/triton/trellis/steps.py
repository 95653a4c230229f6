"""The places of the codes of a trellis, block by block."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.formats.bitpack import WORD, plane_runs, planes
from kvpact.formats.form import TrellisForm
from kvpact.quantizers import trellis


@dataclass(frozen=True)
class Plane:
    """The places of the bits of one plane of a block."""

    width: int = 0  # bits of an item; no plane has 0
    shift: int = 0  # bits of the code below them
    row: int = 0  # of the first word, among those of a token (K) or of a tile (V)
    before: int = 0  # items of other blocks in the same words

    @property
    def mask(self) -> int:
        """The bits of an item."""
        return (1 << self.width) - 1


@dataclass(frozen=True)
class Run:
    """Planes of a width that lie together in words."""

    width: int
    row: int  # the first of their rows of words, as in `Plane`
    end: int  # the row after the last
    planes: tuple[Plane | None, ...]  # of each block that has bits; None for one that has none here


def runs_of(form: TrellisForm, by_token: bool) -> tuple[Run, ...]:
    """Return the runs of all blocks. `by_token`: whether a word holds codes of one token (K)."""
    made: list[Run] = []
    row = 0
    for width, parts in plane_runs(tuple((block.dim, block.bits) for block in form.blocks)):
        before, held = 0, dict[int, Plane]()
        for index, shift, dim in parts:
            held[index] = Plane(width, shift, row, before)
            before += dim
        end = row + (-(-before * width // WORD) if by_token else width)
        having = [index for index, block in enumerate(form.blocks) if block.bits]
        made.append(Run(width, row, end, tuple(map(held.get, having))))
        row = end
    return tuple(made)


@dataclass(frozen=True)
class TrellisSteps:
    """A block of channels, which are the steps of one trellis."""

    begin: int  # first channel
    dim: int  # channels
    bits: int  # of a code
    memory: int  # how many steps before its own the oldest bit is that an index needs
    words: int  # that the steps of K's trellis take turns in; 0 if they lie in their order
    wider: int  # wider codes of one word
    low: Plane  # the lowest plane
    high: Plane  # the other one
    levels: int  # place of the first level among those of all blocks
    unit: float  # what a level of 1 is worth


def steps_of(form: TrellisForm, runs: tuple[Run, ...]) -> tuple[TrellisSteps, ...]:
    """Return the blocks that have bits."""
    made: list[TrellisSteps] = []
    begin = levels = 0
    for block in form.blocks:
        if block.bits:
            held = [run.planes[len(made)] for run in runs]
            low, *others = sorted(filter(None, held), key=lambda plane: plane.shift)
            width = planes(block.bits)[0] if block.bits > 1 else form.interleave
            words, rest = divmod(block.dim * width, WORD)
            high = others[0] if others else Plane()
            one = TrellisSteps(
                begin, block.dim, block.bits, block.states.bit_length() - 1, 0 if rest else words,
                form.interleave // width, low, high, levels, trellis.UNITS[block.bits],
            )  # fmt: skip
            made.append(one)
            levels += 2 << block.bits
        begin += block.dim
    return tuple(made)
