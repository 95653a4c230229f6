"""The Viterbi algorithm over trellises: a thread has a vector, its registers the costs of states.

The body is `quantizers.trellis.encode`: costs are added up number by number, ties take the lower
index. Launch kernels that use it with ``enable_fp_fusion=False``. A warp has the vectors of 32
tokens, whose numbers lie side by side, `[steps, 32]`.
"""

import triton
import triton.language as tl

from kvpact.quantizers import trellis

CELLS, SHORT = tl.constexpr(trellis.CELLS), tl.constexpr(trellis.SHORT)
FAR = tl.constexpr(1e30)


@triton.jit
def _cell(z):
    """Return between which whole and half steps numbers are (see `trellis.cells`)."""
    most: tl.constexpr = CELLS
    twice = z + z
    twice = tl.where(twice < most, twice, most)
    twice = tl.where(twice > -most, twice, -most)
    # Rounded up by hand: `tl.ceil` takes what is below the normal numbers for zero on devices.
    whole = twice.to(tl.int32)
    return whole + (twice > whole.to(tl.float32)).to(tl.int32) + CELLS


@triton.constexpr_function
def _subset(state):
    """Return `trellis.subset` of a window whose oldest bit is 0; the other one's differs in c1."""
    return 2 * ((state ^ state >> 1) & 1) + (state >> 2 & 1)


@triton.jit
def _distances(z, cells):
    """Return the square distances to the nearest points of the four subsets."""
    levels = tl.load(cells + _cell(z))
    distance = ()
    for i in tl.static_range(4):
        rest = z - (levels << (24 - 8 * i) >> 24).to(tl.float32)
        distance += (rest * rest,)
    return distance


@triton.jit
def _ways(cost, distance, STATE: tl.constexpr, STATES: tl.constexpr):
    """Return the costs of the two ways to a state, from state s // 2 and s // 2 + STATES / 2."""
    low = cost[STATE // 2] + distance[_subset(STATE)]
    return low, cost[STATE // 2 + STATES // 2] + distance[_subset(STATE) ^ 2]


@triton.jit
def _costs(cost, z, cells, STATES: tl.constexpr):
    """Return the costs of all states one number later."""
    distance, after = _distances(z, cells), ()
    for state in tl.static_range(STATES):
        low, high = _ways(cost, distance, state, STATES)
        after += (tl.minimum(low, high),)
    return after


@triton.jit
def _origins(cost, origin, z, cells, STATES: tl.constexpr):
    """Return costs one number later, and the states in which the paths to all states began."""
    distance, after, began = _distances(z, cells), (), ()
    for state in tl.static_range(STATES):
        low, high = _ways(cost, distance, state, STATES)
        after += (tl.minimum(low, high),)
        began += (tl.where(high < low, origin[state // 2 + STATES // 2], origin[state // 2]),)
    return after, began


@triton.jit
def _choices(cost, z, cells, STATES: tl.constexpr):
    """Return costs a number later, and of each state (0 at the top) if it is the upper half's."""
    distance, after, upper = _distances(z, cells), (), z.to(tl.uint32) * 0
    for state in tl.static_range(STATES):
        low, high = _ways(cost, distance, state, STATES)
        after += (tl.minimum(low, high),)
        # The sign tells that `high` is less: a subtraction and one shift of two words.
        upper = upper << 1 | (high - low).to(tl.uint32, bitcast=True) >> 31
    return after, upper


@triton.jit
def _cheapest(cost, found, STATES: tl.constexpr):
    """Return what was found for the state of least cost, the lowest one of equals."""
    best, one = cost[0], found[0]
    for other in tl.static_range(1, STATES):
        closer = cost[other] < best
        best, one = tl.where(closer, cost[other], best), tl.where(closer, found[other], one)
    return one


@triton.jit
def _begin(state, STATES: tl.constexpr, OTHERS: tl.constexpr):
    """Return the costs of beginning in each state: 0 for one of them."""
    cost = ()
    for i in tl.static_range(STATES):
        cost += (tl.where(state == i, 0.0, OTHERS),)
    return cost


@triton.jit
def _likely_end(numbers, factor, cells, lane, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return the state before the first number on the best path around it."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    STATES: tl.constexpr = 1 << BLOCK.memory
    HALF: tl.constexpr = BLOCK.dim // 2
    cost = _begin(lane * 0 - 1, STATES, 0.0)
    for i in range(HALF, BLOCK.dim):
        cost = _costs(cost, tl.load(numbers + i * 32 + lane) * factor, cells, STATES)
    origin = ()
    for i in tl.static_range(STATES):
        origin += (lane * 0 + i,)
    for i in range(HALF):
        z = tl.load(numbers + i * 32 + lane) * factor
        cost, origin = _origins(cost, origin, z, cells, STATES)
    return _cheapest(cost, origin, STATES)


@triton.jit
def _best_end(numbers, factor, cells, lane, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return the state that the best of all paths begins and ends with."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    STATES: tl.constexpr = 1 << BLOCK.memory
    best, state = factor * 0.0, lane * 0
    for first in range(STATES):
        cost = _begin(lane * 0 + first, STATES, FAR)
        for i in range(BLOCK.dim):
            cost = _costs(cost, tl.load(numbers + i * 32 + lane) * factor, cells, STATES)
        end = cost[0]
        for i in tl.static_range(1, STATES):
            end = tl.where(first == i, cost[i], end)
        closer = (first == 0) | (end < best)
        best, state = tl.where(closer, end, best), tl.where(closer, first, state)
    return state


@triton.jit
def viterbi(numbers, back, codes, factor, empty, cells, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Store the codes of least square error of 32 vectors.

    `numbers`: `[steps, 32]` fp32; `back`: `[steps, 32]` int16, overwritten; `codes`: `[steps, 32]`
    uint8; `factor`: fp32 `[32]`: makes numbers those in steps of the levels; `empty`: bool `[32]`:
    vectors whose codes are 0; `cells`: int32, `trellis.cells` of the block's bits: levels, then
    points; `FORM`, `INDEX`: something with `trellis.steps.TrellisSteps`, and the place of the block
    among these.
    """
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    STATES: tl.constexpr = 1 << BLOCK.memory
    lane = tl.arange(0, 32)
    if BLOCK.dim < SHORT:
        state = _best_end(numbers, factor, cells, lane, FORM, INDEX)
    else:
        state = _likely_end(numbers, factor, cells, lane, FORM, INDEX)
    cost = _begin(state, STATES, FAR)
    for i in range(BLOCK.dim):
        z = tl.load(numbers + i * 32 + lane) * factor
        cost, upper = _choices(cost, z, cells, STATES)
        tl.store(back + i * 32 + lane, upper.to(tl.int16))
    for i in range(BLOCK.dim):
        step = (BLOCK.dim - 1 - i) * 32 + lane
        points = tl.load(cells + 2 * CELLS + 1 + _cell(tl.load(numbers + step) * factor))
        oldest = tl.load(back + step).to(tl.int32) >> (STATES - 1 - state) & 1
        c1, c0 = (state ^ state >> 1 ^ oldest) & 1, state >> 2 & 1
        code = 2 * (points >> (c1 << 4 | c0 << 3) & 0xFF) + (state & 1)
        tl.store(codes + step, tl.where(empty, 0, code).to(tl.uint8))
        state = state >> 1 | oldest << (BLOCK.memory - 1)
