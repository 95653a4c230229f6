"""Which sequences attend to an exact window, which have none any more, and who goes first."""

import random

import pytest
import torch
import vllm_pages
from vllm_pages import WindowBeside, make_layer

from kvpact.contract import AttendConfig
from kvpact.geometry import CacheGeometry
from kvpact.integrations.pages.window import SLACK, Row, waves

HEADS, DIM, PAGE = 2, 64, 32
EXACT, STORED = (f"turboquant:bits=3,sinks=0,window={width}" for width in (40, 0))
CONFIG = AttendConfig(softmax_scale=0.125)


def make(text, sequences):
    return make_layer(text, HEADS, DIM, pages=8, sequences=sequences)


def tokens(count, seed):
    return torch.randn(3, count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def step(layer, rows, qkv):
    return vllm_pages.step(layer, rows, qkv, CONFIG)[0]


def contiguous(text, *parts):
    """What a contiguous cache with a window beside it answers to the last one of several calls."""
    cache = WindowBeside(text, CacheGeometry(1, HEADS, DIM))
    for part in parts:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in part)
        out = cache.attend(0, k=k, v=v, q=q, config=CONFIG)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("sequences", "text"), [(2, EXACT), (1, STORED)])
def test_a_window_that_others_took_leaves_the_tokens_as_stored(sequences, text):
    layer, first, second = make(EXACT, sequences), tokens(21, 1), tokens(30, 2)
    step(layer, [Row(0, 20, 0, (3,))], first[:, :20])
    step(layer, [Row(0, 30, 0, (5,))], second)
    out = step(layer, [Row(0, 1, 20, (3,))], first[:, 20:])
    assert torch.equal(out, contiguous(text, first[:, :20], first[:, 20:]))


def test_a_full_page_that_another_sequence_wrote_has_its_window():
    layer, shared = make(EXACT, 4), tokens(32, 3)
    one, two = tokens(1, 4), tokens(1, 5)
    step(layer, [Row(0, 32, 0, (3,))], shared)
    rows = [Row(0, 1, 32, (3, 4)), Row(1, 2, 32, (3, 5))]
    out = step(layer, rows, torch.cat([one, two], 1))
    # One of them can go on writing behind it; the other reads what is stored.
    assert torch.equal(out[:1], contiguous(EXACT, shared, one))
    assert torch.equal(out[1:], contiguous(STORED, shared, two))


def test_a_page_that_another_sequence_took_has_no_window_of_before():
    layer, before, after = make(EXACT, 4), tokens(20, 6), tokens(25, 7)
    step(layer, [Row(0, 20, 0, (3,))], before)
    step(layer, [Row(0, 10, 0, (3,))], after[:, :10])
    out = step(layer, [Row(0, 15, 10, (3,))], after[:, 10:])
    assert torch.equal(out, contiguous(EXACT, after[:, :10], after[:, 10:]))


def test_a_window_on_a_page_that_a_new_sequence_gets_makes_room_before_others_do():
    layer, lost = make(EXACT, 2), []
    layer._windows.lost = lambda page, _: lost.append(page)
    for pages in ((3,), (5,), (3, 5), (7,), (6,)):
        step(layer, [Row(0, 20, 0, pages)], tokens(20, pages[0]))
    assert lost == [5]


def test_a_sequence_that_was_taken_back_has_no_window_of_what_it_held():
    layer, before, after = make(EXACT, 4), tokens(20, 14), tokens(3, 15)
    step(layer, [Row(0, 20, 0, (3,))], before)
    out = step(layer, [Row(0, 3, 10, (3,))], after)
    assert torch.equal(out, contiguous(STORED, before[:, :10], after))


def test_a_prefix_on_a_page_that_another_sequence_ended_on_has_no_window_of_it():
    layer, before, after, one = make(EXACT, 4), tokens(32, 9), tokens(40, 10), tokens(1, 11)
    step(layer, [Row(0, 32, 0, (3,))], before)
    step(layer, [Row(0, 40, 0, (3, 4))], after)
    out = step(layer, [Row(0, 1, 32, (3, 5))], one)
    assert torch.equal(out, contiguous(STORED, after[:, :32], one))


@pytest.mark.parametrize("counts", [[1] * (40 + 2 * SLACK + 3), [39, 1, 40, 41, 3, 1], [200, 1, 5]])
def test_a_window_moves_with_its_sequence(counts):
    layer, given = make(EXACT, 1), tokens(sum(counts), 8)
    held, parts = 0, []
    for count in counts:
        new = given[:, held : held + count]
        pages = tuple(range(-(-(held + count) // PAGE)))
        out = step(layer, [Row(0, count, held, pages)], new)
        parts.append(new)
        held += count
    assert torch.equal(out, contiguous(EXACT, *parts))


def test_windows_that_step_together_move_in_the_same_steps():
    layer, given = make(EXACT, 2), (tokens(100, 12), tokens(100, 13))
    pages = (tuple(range(4)), tuple(range(4, 8)))

    def row(i, start, held, count):
        return Row(start, start + count, held, pages[i][: -(-(held + count) // PAGE)])

    held = [40, 40]
    for i in range(2):
        step(layer, [row(i, 0, 0, 40)], given[i][:, :40])
    for _ in range(5):
        step(layer, [row(0, 0, held[0], 1)], given[0][:, held[0] : held[0] + 1])
        held[0] += 1
    moved = []
    for number in range(2 * SLACK):
        before = [window.memories for window in layer._windows._at.values()]
        new = torch.cat([given[i][:, n : n + 1] for i, n in enumerate(held)], 1)
        out = step(layer, [row(i, i, n, 1) for i, n in enumerate(held)], new)
        held = [n + 1 for n in held]
        now = {id(window.memories) for window in layer._windows._at.values()}
        stayed = now & {id(memories) for memories in before}
        assert len(stayed) in (0, 2)
        moved += [] if stayed else [number]
    assert moved == [SLACK - 5, 2 * SLACK - 5]
    for i, n in enumerate(held):
        steps = [given[i][:, t : t + 1] for t in range(40, n)]
        assert torch.equal(out[i : i + 1], contiguous(EXACT, given[i][:, :40], *steps))


def row(start, held, new, *pages):
    return Row(start, start + new, held, pages)


def test_a_batch_whose_rows_share_only_older_pages_is_one_part():
    rows = [row(0, 64, 1, 1, 2, 3), row(1, 64, 32, 1, 2, 4), row(33, 0, 20, 5)]
    assert waves(rows, PAGE) == [rows] and waves([], PAGE) == []


def test_a_row_comes_after_the_one_that_fills_its_page_in_the_same_step():
    reader, writer = row(0, 32, 24, 17, 6), row(24, 27, 20, 17, 5)
    assert waves([reader, writer], PAGE) == [[writer], [reader]]


def test_a_page_that_is_filled_later_is_read_by_nobody_and_holds_nobody_up():
    rows = [row(0, 32, 1, 17, 6), row(1, 27, 4, 8)]
    assert waves(rows, PAGE) == [rows]


def test_a_chain_of_rows_is_as_many_parts_in_any_order():
    chain = [row(0, 0, 40, 1, 2), row(40, 32, 40, 1, 3, 4), row(80, 64, 40, 1, 3, 5, 6)]
    beside = row(120, 10, 1, 9)
    for seed in range(6):
        rows = random.Random(seed).sample([*chain, beside], 4)
        first, second, third = waves(rows, PAGE)
        assert (set(first), second, third) == ({chain[0], beside}, [chain[1]], [chain[2]])
