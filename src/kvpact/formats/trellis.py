"""What kernels have to know of a trellis' slots and of K's treatment before it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrellisBlock:
    """Channels with a rotation and a trellis of their own.

    `bits`: of a code, whose levels are those of `quantizers.trellis`; 0 for channels that are zero.
    `seed`: of the rotation's signs (`transforms.RandomHadamard`).
    """

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
