"""Calls longer than the room a budget leaves for layers that are a call apart."""

import pytest
import torch
from tests.cache.test_budget import BYTES, SHAPE, most_allocated, states
from tests.helpers.faults import same_state

import kvpact
import kvpact.cache.batch.contiguous as contiguous
from kvpact.cache.budget.budget import Budget, ladder_of
from kvpact.cache.layer.states import layer_state
from kvpact.errors import BudgetExceeded, NonFiniteError
from kvpact.testing import held_bytes, random_tokens


def given(start, stop, heads=2):
    whole = random_tokens(1, heads, 2200, 32, seed=heads, dtype=torch.bfloat16)
    return whole[:, :, start:stop]


def call(cache, start, stop, layers=range(4)):
    """Give tokens to layers; return their outputs, never with more bytes than the budget."""
    found = []
    for layer in layers:
        k, q = given(start, stop), given(start, stop, 4)
        found.append(cache.attend(layer, k=k, v=-k, q=q))
        assert found[-1].isfinite().all()
        assert cache.memory_usage() == held_bytes(cache) <= BYTES
    return found


def new_cache(**options):
    return kvpact.create_cache("none", SHAPE, budget=BYTES, **options)


def test_a_schedule_tells_which_calls_layers_can_t_take_one_after_the_other():
    shape = kvpact.CacheGeometry(30, 3, 64, dtype=torch.float32)
    schedule = Budget(24 << 20, ladder_of(None, None, 30)).schedule(shape, 1, torch.float32)
    found = [schedule.crowded(*x) for x in ((1024, 256), (1024, 128), (1024, 64), (0, 4096))]
    assert found == [True, True, False, False]
    first = schedule.ladder(0, 1024, 256)[0]
    assert first == (0, schedule.spec(0, 1280)) != schedule.layers[0][0]
    assert schedule.ladder(0, 0, 4096) == schedule.layers[0]


@pytest.mark.parametrize("size", [128, 500, 1000])
def test_turns_of_any_length_run_and_end_as_the_schedule_says(size):
    cache = new_cache()
    call(cache, 0, 130)
    schedule = cache._schedule
    crowded = 0
    for start in range(130, 2100 - size, size):
        crowded += schedule.crowded(start, size)
        call(cache, start, start + size)
        assert cache.specs == [schedule.spec(layer, start + size) for layer in range(4)]
    assert crowded
    held = cache.seq_len(0)
    with pytest.raises(BudgetExceeded, match="at the lowest rungs"):
        call(cache, held, held + schedule.max_tokens - held + 1)
    assert cache.seq_len(0) == held


def test_tokens_held_are_encoded_once_more_and_the_new_ones_at_once():
    """What a layer holds then is what an empty one of the last spec becomes with its tokens."""
    cache, plain = new_cache(), new_cache()
    call(cache, 0, 130)
    call(plain, 0, 130)
    schedule = cache._schedule
    assert schedule.crowded(130, 1000)
    held = [(plain.dequantize(i, "k"), plain.dequantize(i, "v")) for i in range(4)]
    call(cache, 130, 1130)
    for layer, (k, v) in enumerate(held):
        spec = schedule.spec(layer, 1130)
        fresh = kvpact.create_cache(str(spec), kvpact.CacheGeometry(1, 2, 32, dtype=k.dtype))
        fresh.attend(0, k=k, v=v, q=given(0, 130, 4))
        fresh.attend(0, k=given(130, 1130), v=-given(130, 1130), q=given(130, 1130, 4))
        assert same_state(layer_state(fresh.entry(0)), states(cache)[layer])


def test_no_long_call_takes_more_than_the_budget_while_it_works():
    for size in (200, 256, 700, 1270):
        cache = new_cache()
        for start, stop in [(0, 130), *((x, min(x + size, 1400)) for x in range(130, 1400, size))]:
            for layer in range(4):
                k, before = given(start, stop), cache.memory_usage()
                assert before + most_allocated(cache, layer, k, -k) <= BYTES


class Stop(BaseException):
    """Stands for a user's interrupt."""


@pytest.mark.parametrize("where", range(8))
def test_an_interrupt_between_any_two_parts_leaves_a_cache_that_goes_on(where, monkeypatch):
    """K of the layers in front is at the end's rung then, or K and V; none of the new tokens is."""
    cache, left = new_cache(), [where]
    call(cache, 0, 500)
    go_on = contiguous.CacheLayer.new_stream

    def stops(layer, x, key, codec=None, spec=None):
        if spec is not None:
            left[0] -= 1
            if left[0] < 0:
                raise Stop
        return go_on(layer, x, key, codec, spec)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(contiguous.CacheLayer, "new_stream", stops)
        call(cache, 500, 1200)
    assert [cache.seq_len(layer) for layer in range(4)] == [500] * 4
    other = new_cache()
    other.restore(cache.snapshot())
    assert all(map(same_state, states(other), states(cache)))
    for one in (cache, other):
        call(one, 500, 1200)
        assert one.specs == [one._schedule.spec(layer, 1200) for layer in range(4)]
    assert all(map(same_state, states(other), states(cache)))
    cache.truncate(700)
    call(cache, 700, 1400)


def test_layers_that_are_behind_take_the_rungs_of_the_same_end():
    """A call that ends after two layers is rolled back, and comes again as another one."""
    cache = new_cache()
    call(cache, 0, 500)
    call(cache, 500, 1200, range(2))
    assert cache.specs == [cache._schedule.spec(layer, 1200) for layer in range(4)]
    cache.truncate(500)
    call(cache, 500, 900)
    assert cache.seq_len(3) == 900


def test_what_is_refused_leaves_all_layers_where_they_were():
    cache = new_cache()
    call(cache, 0, 500)
    before, k = states(cache), given(500, 1200).clone()
    k[0, 0, 3, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="nothing was stored"):
        cache.attend(0, k=k, v=k, q=given(500, 1200, 4))
    assert all(map(same_state, states(cache), before))
