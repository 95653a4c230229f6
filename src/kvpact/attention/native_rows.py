"""Which native kernel takes a call: the one for few query rows per KV head, or the one for many.

The kernel for few rows reads the slots once for up to eight rows; the one for many decodes a block
of tokens once and multiplies matrices, for chunks of a prompt, speculative checks and latents.
"""

from __future__ import annotations

import ctypes

from kvpact.kernels.cpu import structs
from kvpact.kernels.dispatch import Kernel

MANY_ROWS = 32
"""Rows (query heads per KV head times queries) from which the kernel for many rows is faster."""

MANY_ROWS_FAST = 64
"""The same where the kernel for few rows computes in 8-bit integers."""


def run(kernel: Kernel, args: structs.AttendArgs, latent: bool) -> int:
    """Call the kernel that is the faster one, or the only one for latents; return its status."""
    library = kernel.library
    assert library is not None
    few = MANY_ROWS_FAST if kernel.fast else MANY_ROWS
    if latent or args.groups * args.queries >= few:
        return int(library.attend_rows(library.bit, ctypes.byref(args), latent))
    return int(library.attend(library.bit, ctypes.byref(args)))
