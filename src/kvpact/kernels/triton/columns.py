"""The table of batch rows for attention kernels: counts and addresses of tokens.

One launch serves calls of unlike lengths, so everything that differs from row to row stands in one
table on the device, `[B, COLUMNS]` int64. Exact tokens lie in three sources for K and three for V:
the tail, the sinks and the new tokens; of each the table has the address of head 0, and bytes to
the next head and to the next token.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

COLUMNS = tl.constexpr(49)
HELD, NEW, K_EXACT_FROM, V_EXACT_FROM, PADDING, K_SINKS, V_SINKS, FIRST_QUERY = (
    tl.constexpr(place) for place in range(8)
)
K_TAIL, K_SINK, K_NEW, V_TAIL, V_SINK, V_NEW = (tl.constexpr(8 + 3 * s) for s in range(6))
# Tokens that another kernel attends.
SKIP_FROM, SKIP_TO = tl.constexpr(26), tl.constexpr(27)
# The first sink token, and rules.
SINKS_FROM, WINDOW, CAUSAL = tl.constexpr(28), tl.constexpr(29), tl.constexpr(30)
# Slots: the addresses of `SlotPlaces.table` and `SlotPlaces.heads`, the row there, its rows and
# segments, tokens of a segment.
K_SLOTS, V_SLOTS = tl.constexpr(31), tl.constexpr(37)
# Addresses, 0 for none; bytes to the next query head, query and token.
MASK, SINK_LOGITS = tl.constexpr(43), tl.constexpr(47)
# Where the row stands in the output.
OUTPUT = tl.constexpr(48)


@dataclass(frozen=True)
class SideColumns:
    """Columns of K, or of V: counts, and the first of each source of exact tokens and of slots."""

    exact_from: int
    sinks: int
    tail: int
    sink: int
    new: int
    slots: int


K_SIDE = SideColumns(*(x.value for x in (K_EXACT_FROM, K_SINKS, K_TAIL, K_SINK, K_NEW, K_SLOTS)))
V_SIDE = SideColumns(*(x.value for x in (V_EXACT_FROM, V_SINKS, V_TAIL, V_SINK, V_NEW, V_SLOTS)))


@triton.jit
def of_row(ROWS, row, PLACE: tl.constexpr):
    """Return a number of a batch row, int64."""
    return tl.load(ROWS + row * COLUMNS + PLACE)


@triton.jit
def count_of_row(ROWS, row, PLACE: tl.constexpr):
    """Return a number of tokens, int32."""
    return of_row(ROWS, row, PLACE).to(tl.int32)
