"""Devices count where the tail begins as everybody else does."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import triton

from kvpact.cache.stream.advance import advance as rule
from kvpact.kernels import WAITING
from kvpact.kernels.triton.columns import COLUMNS, HELD, K_EXACT_FROM, V_EXACT_FROM
from kvpact.kernels.triton.step.kernels import Counting, advance


@triton.jit
def _advance(ROWS, COUNTING: triton.language.constexpr):
    advance(ROWS, 0, COUNTING)


@pytest.mark.parametrize(("window", "group"), [(0, 1), (0, 32), (24, 1), (24, 32), (WAITING, 32)])
def test_the_tail_begins_where_the_rule_says(window, group):
    for held, before, new in product((0, 31, 96), (0, 8, 64), (1, 8)):
        rows = torch.zeros(1, COLUMNS.value, dtype=torch.int64)
        rows[0, [HELD.value, K_EXACT_FROM.value, V_EXACT_FROM.value]] = torch.tensor(
            [held, before, before]
        )
        _advance[(1,)](rows, Counting(new, False, window, group, window, group))
        # A window beside pages moves token by token, and never ends within the group that is open.
        unit = 1 if window else group
        wanted = before if window == WAITING else rule(0, before, held, 0, new, unit, window).tail
        assert rows[0, K_EXACT_FROM.value] == rows[0, V_EXACT_FROM.value] == wanted
