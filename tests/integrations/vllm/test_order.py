"""A sequence that begins with a page of the same batch attends after it is filled."""

import random

from kvpact.integrations.vllm.order import waves
from kvpact.integrations.vllm.window import Row

PAGE = 32


def row(start, held, new, *pages):
    return Row(start, start + new, held, pages)


def test_a_batch_whose_rows_share_only_older_pages_is_one_part():
    rows = [row(0, 64, 1, 1, 2, 3), row(1, 64, 32, 1, 2, 4), row(33, 0, 20, 5)]
    assert waves(rows, PAGE) == [rows]
    assert waves([], PAGE) == []


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
