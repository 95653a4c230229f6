"""Recipes within budgets, and how budgets are written."""

import random
from itertools import pairwise, product

import pytest

from kvpact.evaluate import verdict_of
from kvpact.recommend import RecommendationError, allocate, budget_bytes
from kvpact.recommend.base import SIDES
from kvpact.recommend.budget import Rung


def ladders(seed):
    """K and V of three layers with five rungs each; some are no better than a smaller one."""
    draw = random.Random(seed)

    def rung(i):
        return Rung(f"r{i}", 10 + 7 * i + draw.randrange(5), draw.uniform(0.1, 4) / (i + 1))

    return {slot: [rung(i) for i in range(5)] for slot in product(range(3), SIDES)}


@pytest.mark.parametrize("seed", range(5))
def test_more_bytes_never_cost_more_and_no_budget_is_exceeded(seed):
    given = ladders(seed)
    least = sum(min(rung.bytes for rung in rungs) for rungs in given.values())
    costs = []
    for budget in range(least, 300):
        taken = allocate(given, budget)
        assert sorted(taken) == sorted(given)
        assert sum(rung.bytes for rung in taken.values()) <= budget
        costs.append(sum(rung.cost for rung in taken.values()))
    assert all(after <= before for before, after in pairwise(costs))
    best = sum(min(rung.cost for rung in rungs) for rungs in given.values())
    assert costs[-1] == pytest.approx(best) and costs[0] > best


def test_the_recipe_is_the_best_one_at_its_own_bytes():
    given = {slot: rungs for slot, rungs in ladders(7).items() if slot[1] == "key"}
    taken = allocate(given, 70)
    held = sum(rung.bytes for rung in taken.values())
    fitting = (x for x in product(*given.values()) if sum(rung.bytes for rung in x) <= held)
    all_of_them = [sum(rung.cost for rung in rungs) for rungs in fitting]
    # The steps taken are the most worthwhile ones, but for the last that still fit.
    assert sum(rung.cost for rung in taken.values()) <= 1.2 * min(all_of_them)


def test_a_side_that_is_worth_more_gets_more():
    rungs = [Rung("small", 10, 1.0), Rung("large", 20, 0.1)]
    worth = [Rung("small", 10, 5.0), Rung("large", 20, 0.5)]
    taken = allocate({(0, "key"): rungs, (0, "value"): worth}, 30)
    assert [taken[0, side].spec for side in SIDES] == ["small", "large"]


def test_a_budget_below_the_smallest_recipe_is_refused():
    with pytest.raises(RecommendationError, match=r"leaves 19 bytes .* take 20"):
        allocate({(0, side): [Rung("a", 10, 1.0)] for side in SIDES}, 19)


@pytest.mark.parametrize(("text", "expected"), [
    ("25%", 250), ("12.5 %", 125), ("100%", 1000), ("4GB", 4 * 10**9), ("1.5GiB", 3 * 2**29),
    ("300mb", 3 * 10**8), ("2 KiB", 2048), ("77", 77), ("77B", 77),
])  # fmt: skip
def test_budgets(text, expected):
    assert budget_bytes(text, 1000) == expected


@pytest.mark.parametrize("text", ["", "much", "-3GB", "4XB", "101%", "0", "0%", "1_0", "٣GB", "%"])
def test_budgets_that_are_none(text):
    with pytest.raises(RecommendationError, match="budget"):
        budget_bytes(text, 1000)


def test_verdicts():
    found = [verdict_of(kl) for kl in (0.0, 0.0005, 0.0006, 0.002, 0.02, 0.021, float("nan"))]
    assert verdict_of(0.0001, scored=499) == "no verdict"
    assert found == [
        "exact", "very close", "close", "close", "visible", "broken", "broken",
    ]  # fmt: skip
