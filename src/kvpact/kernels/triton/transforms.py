"""`RandomHadamard`, sums in a fixed order and casts, of tiles whose width is a power of two.

Numbers are those of `kvpact.transforms` and `kvpact.arithmetic`, to the bit. Launch kernels that
use them with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def block_of(dim):
    """Return the largest power of two that is not above `dim`."""
    return 1 << (dim.bit_length() - 1)


@triton.constexpr_function
def log2(count):
    """Return how often `count` has to be halved, rounding up, until it is 1."""
    return (count - 1).bit_length()


@triton.constexpr_function
def halved(count, times):
    """Return what is left of `count` after it was halved so often, rounding up."""
    return -(-count >> times)


@triton.jit
def saturated(x, TYPE: tl.constexpr):
    """Round fp32 as `arithmetic.saturated` does, ties to even, to fp32, fp16 or bf16."""
    if TYPE.is_fp16():
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif TYPE.is_bf16():
        # In integers: Triton's interpreter cuts bits off instead of rounding them.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        x = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Apply the orthonormal Walsh-Hadamard transform to each block of a tile's channels.

    `x`: fp32 `[ROWS, WIDTH]`; `ROWS`, `WIDTH`, `BLOCK`: powers of two, BLOCK at most WIDTH.
    """
    for i in tl.static_range(log2(BLOCK)):
        pairs = x.reshape(ROWS, WIDTH // (2 << i), 2, 1 << i).permute(0, 1, 3, 2)
        low, high = tl.split(pairs)
        x = tl.join(low + high, low - high).permute(0, 1, 3, 2).reshape(ROWS, WIDTH)
    return x * (BLOCK**-0.5)


@triton.jit
def _last_block(y, SIGNS, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return the channels of the last block, first in the tile, and their signs."""
    BLOCK: tl.constexpr = block_of(DIM)
    d = tl.arange(0, WIDTH)
    index = tl.broadcast_to(((d + (DIM - BLOCK)) % WIDTH)[None, :], (ROWS, WIDTH))
    signs = tl.load(SIGNS + DIM + d, mask=d < BLOCK, other=0.0)
    return tl.gather(y, index, 1), signs[None, :]


@triton.jit
def _placed(y, last, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return a tile with what `_last_block` gave back in its place; 0 after it."""
    START: tl.constexpr = DIM - block_of(DIM)
    d = tl.arange(0, WIDTH)
    index = tl.broadcast_to(((d + (WIDTH - START)) % WIDTH)[None, :], (ROWS, WIDTH))
    y = tl.where((d < START)[None, :], y, tl.gather(last, index, 1))
    return tl.where((d < DIM)[None, :], y, 0.0)


@triton.jit
def rotated(x, SIGNS, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Apply `RandomHadamard.forward`.

    `x`: fp32 `[ROWS, WIDTH]`, 0 from channel `DIM` on; so is what is returned. `SIGNS`:
    `[DIM + block]` fp32 (`transforms.hadamard.random_signs`).
    """
    BLOCK: tl.constexpr = block_of(DIM)
    d = tl.arange(0, WIDTH)
    x = x * tl.load(SIGNS + d, mask=d < DIM, other=0.0)[None, :]
    y = hadamard(x, ROWS, WIDTH, BLOCK)
    if BLOCK != DIM:
        y = tl.where((d < BLOCK)[None, :], y, x)
        last, signs = _last_block(y, SIGNS, ROWS, WIDTH, DIM)
        y = _placed(y, hadamard(last * signs, ROWS, WIDTH, BLOCK), ROWS, WIDTH, DIM)
    return y


@triton.jit
def rotated_back(y, SIGNS, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Apply `RandomHadamard.inverse`; parameters as of `rotated`."""
    BLOCK: tl.constexpr = block_of(DIM)
    d = tl.arange(0, WIDTH)
    if BLOCK != DIM:
        last, signs = _last_block(y, SIGNS, ROWS, WIDTH, DIM)
        y = _placed(y, hadamard(last, ROWS, WIDTH, BLOCK) * signs, ROWS, WIDTH, DIM)
    x = hadamard(y, ROWS, WIDTH, BLOCK)
    if BLOCK != DIM:
        x = tl.where((d < BLOCK)[None, :], x, y)
    return x * tl.load(SIGNS + d, mask=d < DIM, other=0.0)[None, :]


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Sum over channels in the order of `arithmetic.tree_sum`: fp32 `[ROWS]`.

    `x`: fp32 `[ROWS, WIDTH]`; `DIM`: channels that are summed: the first ones.
    """
    if DIM != WIDTH:
        x = _leaves(x, ROWS, WIDTH, DIM)
    for i in tl.static_range(log2(WIDTH)):
        low, high = tl.split(x.reshape(ROWS, 2, WIDTH >> (i + 1)).permute(0, 2, 1))
        x = low + high
    return x.reshape(ROWS)


@triton.jit
def _leaves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return channels where a tree that halves a power of two adds them as `tree_sum` does.

    Halving an odd number leaves its last item alone: that is a sum with -0, which changes nothing.
    """
    LOG: tl.constexpr = log2(DIM)
    leaf = tl.arange(0, WIDTH)
    item = tl.zeros((WIDTH,), tl.int32)
    there = leaf < (1 << LOG)
    # From the sum back: item j of what was halved was item j, and the one half of it further.
    for i in tl.static_range(LOG):
        size = halved(DIM, LOG - 1 - i)
        second = (leaf >> i) & 1
        alone = item == size // 2
        there = there & ~(alone & (second == 1))
        item = tl.where(alone, size - 1, item + second * (size // 2))
    index = tl.broadcast_to(item[None, :], (ROWS, WIDTH))
    return tl.where(there[None, :], tl.gather(x, index, 1), -0.0)
