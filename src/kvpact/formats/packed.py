"""How the slots of a stream become numbers, told in a way that compiled kernels understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrellisBlock:
    """Channels with a trellis, and a rotation with signs of `seed`; without `bits` all are zero."""

    dim: int
    bits: int
    states: int
    seed: int


@dataclass(frozen=True)
class TrellisForm:
    """A vector: less its base, times its weights, in the order of its blocks.

    Weights, order, deviations and the first key are the codec's `state()`, by these names and per
    KV head; what is not there is 1, the order of channels, 1, or 0.

    `interleave`: bits of the wider codes that kernels make of codes (see `formats.bitpack`).
    `center`: tokens that share a mean; 0 for none.
    """

    blocks: tuple[TrellisBlock, ...]
    interleave: int
    center: int = 0


@dataclass(frozen=True)
class PackedFormat:
    """One stream's slots.

    With `level` the number that a code stands for (`levels` times `unit`), a vector is, K and V
    alike::

        scale[token, channel group] * level + zero[token, channel group]

    or, with numbers per channel and group of tokens (`fold`, `shift`)::

        K: scale[token] * (fold * level + shift)    if shift_scaled
        K: scale[token] * (fold * level) + shift    otherwise
        V: fold * (scale[token] * level + zero[token])

    What is not named is 1 (scale, fold) or 0 (zero, shift). Of a trellis, `trellis` says what a
    vector is.

    Parameters
    ----------
    kind : {"table", "linear", "raw", "e4m3", "e5m2", "trellis"}
        Codes index `levels`; codes are numbers to which ``levels[0]`` is added; one number of that
        format per channel and token; or codes of a trellis.
    bits : int
        Width of the codes (of the numbers, where they are no codes).
    levels : tuple of float
        In units. Kernels can multiply whole numbers of 8 bits (-128 to 127) exactly in integers, so
        state those where there are any.
    codes, scale, zero, fold, shift : str or None
        Names of the fields; those of a trellis have the names that `Encoding` tells.
    channels : int
        Channels that share a scale and a zero; 0 for all.
    group : int
        Tokens that share fold and shift; 0 where there are none.
    shift_scaled : bool
        As above.
    middle : float
        Taken off the levels: with a zero or a shift, `level + middle` stands in place of `level`.
        A grid that begins at its least number would lose bits where sums cancel.
    unit : float
        What a level of 1 is worth.
    trellis : TrellisForm or None
        What there is to know of a trellis.
    """

    kind: Literal["table", "linear", "raw", "e4m3", "e5m2", "trellis"]
    bits: int
    levels: tuple[float, ...] = ()
    codes: str = "codes"
    scale: str | None = None
    zero: str | None = None
    fold: str | None = None
    shift: str | None = None
    channels: int = 0
    group: int = 0
    shift_scaled: bool = False
    middle: float = 0.0
    unit: float = 1.0
    trellis: TrellisForm | None = None

    @property
    def whole(self) -> bool:
        """Whether all levels are whole numbers of 8 bits."""
        return bool(self.levels) and all(
            float(level).is_integer() and -128 <= level <= 127 for level in self.levels
        )

    @property
    def integer_unit(self) -> float:
        """What levels are whole numbers of 8 bits of, or 0.0; grids around a middle have halves."""
        if self.whole:
            return self.unit
        halves = bool(self.levels) and all(
            float(2 * level).is_integer() and -64 <= level < 64 for level in self.levels
        )
        return self.unit / 2 if halves else 0.0

    @property
    def signed(self) -> bool:
        """Whether a code is its level in two's complement, but for its top bit."""
        half = len(self.levels) // 2
        return bool(half) and self.levels == tuple(range(-half, half))
