"""Which native kernel takes a call: the one for few query rows per KV head, or the one for many.

The kernel for few rows reads the slots once for up to eight rows; the one for many decodes a block
of tokens once and multiplies matrices, for chunks of a prompt, speculative checks and latents.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.kernels.plan import Kernel

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


def run(kernel: Kernel, calls: Sequence[tuple[bytes, int]], latent: bool) -> int:
    """Carry out calls, each by the kernel that is the faster one; return the kernels' status.

    Parameters
    ----------
    kernel : Kernel
        What computes.
    calls : sequence of tuple
        Arguments, and query rows of a KV head. Calls with few rows are carried out at once.
    latent : bool
        Calls of `attend_latent`, which the kernel for many rows alone has.
    """
    library = kernel.library
    assert library is not None
    least = 1 if latent else MANY_ROWS_FAST if kernel.fast else MANY_ROWS
    few = [args for args, rows in calls if rows < least]
    status = int(library.attend(library.bit, b"".join(few), len(few))) if few else 0
    for args, rows in calls:
        if rows >= least and status == 0:
            status = int(library.attend_rows(library.bit, args, latent))
    return status
