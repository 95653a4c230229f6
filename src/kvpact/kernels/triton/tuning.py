"""Launch settings of attention kernels, as tables: nothing is measured at run time.

None of it has been timed on a device yet. Of the fast kernels, blocks of 64 tokens (128 where V has
3 bits), one warp and two buffers have the fewest instructions a token without spills; of the
general one, the pieces and warps below have.
"""

from typing import NamedTuple

import torch
import triton

TOKENS_OF_A_PART = 256
"""Tokens that a program attends at least: below that it only makes work for the merge."""
PROGRAMS_PER_PROCESSOR = 8
PROCESSORS = 132  # the count for a device that does not report how many it has
LEAST_CHUNK = 64
"""New tokens of a row from which on flash attention computes what they are to each other: fewer
are little next to their past, and a launch more."""


def block_tiles(value_bits: int) -> int:
    """Return the tiles of 32 tokens of a block: as many as four words of V hold, or two."""
    return 4 if value_bits == 3 else 2


class Choice(NamedTuple):
    """The launch settings of a variant."""

    tiles: int  # tiles of 32 tokens of a block
    warps: int  # of a program; with one there are no barriers
    stages: int  # of Triton's pipeline. Address, then copy: 3 have one buffer, 5 two
    registers: int | None = None  # of a thread; left to itself the assembler spills a few of 170


def choice(value_bits: int, rows: int, inside: bool) -> Choice:
    """Return how the kernel is launched."""
    tiles = block_tiles(value_bits)
    registers = 255 if rows > 4 or not inside else None
    if value_bits == 3:
        return Choice(tiles, 2 if rows > 8 else 1, 5, registers)
    return Choice(tiles, 1, 5, registers)


class GeneralChoice(NamedTuple):
    """The launch settings of a variant of the general kernel."""

    warps: int
    keys: int  # channels of keys that are multiplied at a time, at most
    values: int  # and of values


def general_choice(rows: int, width: int, thrice: bool) -> GeneralChoice:
    """Return how the general kernel is launched; `width`: channels, padded to a power of two."""
    if rows == 16 and width <= (128 if thrice else 256):
        return GeneralChoice(4, 64 if thrice else 128, 64)
    if width > 512:
        return GeneralChoice(16, 32, 128)
    if width > 256 and thrice:
        return GeneralChoice(8, 64, 128)
    return GeneralChoice(8, 32 if thrice else 128, 128 if rows == 64 else 64)


def side_by_side(version: str = triton.__version__) -> int:
    """Return the bytes of k that stand side by side in a thread: eight before Triton 3.8."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return 8 if (major, minor) < (3, 8) else 4


def parts_of(tokens: int, programs: int, device: torch.device) -> int:
    """Return into how many parts tokens are split; `programs`: that there are without a split."""
    processors = PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = processors * PROGRAMS_PER_PROCESSOR // max(programs, 1)
    return max(1, min(wanted, -(-tokens // TOKENS_OF_A_PART)))
