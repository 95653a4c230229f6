"""The places of the codes of a trellis, block by block."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.formats.bitpack import WORD, plane_runs, planes
from kvpact.formats.form import TrellisForm
from kvpact.quantizers import trellis


@dataclass(frozen=True)
class Plane:
    """The places of the bits of one plane of a block.

    - `width`, `shift`: bits of an item, and those of the code below them; no plane has 0 bits.
    - `row`: of the first word, among those of a token (K) or of a tile (V).
    - `before`: items of other blocks in the same words.
    """

    width: int = 0
    shift: int = 0
    row: int = 0
    before: int = 0

    @property
    def mask(self) -> int:
        """The bits of an item."""
        return (1 << self.width) - 1


@dataclass(frozen=True)
class Run:
    """Planes of a width that lie together in words.

    - `row`, `end`: their rows of words, as in `Plane`.
    - `planes`: of each block that has bits, its plane; None for one that has none here.
    """

    width: int
    row: int
    end: int
    planes: tuple[Plane | None, ...]


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
    """A block of channels, which are the steps of one trellis.

    - `begin`, `dim`, `bits`: first channel, channels, bits of a code.
    - `memory`: how many steps before its own the oldest bit is that an index needs.
    - `words`: words that the steps of K's trellis take turns in; 0 if they lie in their order.
    - `wider`: wider codes of one word.
    - `low`, `high`: the lowest plane, and the other one.
    - `levels`: place of the first level among those of all blocks.
    - `unit`: what a level of 1 is worth.
    """

    begin: int
    dim: int
    bits: int
    memory: int
    words: int
    wider: int
    low: Plane
    high: Plane
    levels: int
    unit: float


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
