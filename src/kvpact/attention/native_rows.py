"""Which native kernel takes a call: the one for few query rows per KV head, or the one for many.

The kernel for few rows reads the slots once for up to eight rows; the one for many decodes a block
of tokens once and multiplies matrices, for chunks of a prompt, speculative checks and latents.
"""

from __future__ import annotations

import ctypes

from kvpact.kernels.cpu import structs
from kvpact.kernels.dispatch import Kernel

MANY_ROWS = 32
"""Rows (query heads per KV head times queries) from which the kernel for many rows takes a call.

With AVX-512 the two are even at about 64 rows in 2, 3, 4 and 8 bits (5 % apart at 32), at 16 to 32
in other formats; with AVX2 at about 20 (`benchmarks/rows.py`). There is no length from which torch
would be faster: with chunks of 512 tokens it takes three times as long.
"""

MANY_ROWS_FAST = 64
"""The same where the kernel for few rows computes in 8-bit integers, as far as the format allows:
that is a quarter faster still at 64 to 128 rows in 4 bits, no faster in 8, and less exact.
"""


def run(kernel: Kernel, args: structs.AttendArgs, latent: bool) -> int:
    """Call the kernel that is the faster one, or the only one for latents; return its status."""
    library = kernel.library
    assert library is not None
    few = MANY_ROWS_FAST if kernel.fast else MANY_ROWS
    if latent or args.groups * args.queries >= few:
        return int(library.attend_rows(library.bit, ctypes.byref(args), latent))
    return int(library.attend(library.bit, ctypes.byref(args)))
