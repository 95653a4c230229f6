"""Tokens that can't be stored: their sequence gets NaN, and no other notices; no vLLM is needed."""

from functools import partial

import pytest
import torch
import vllm_pages
from vllm_pages import make_layer

from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.integrations.pages.damage import storable
from kvpact.integrations.pages.window import Row

HEADS, DIM, SPEC = 2, 64, "turboquant:bits=4,sinks=0"
CONFIG = AttendConfig(softmax_scale=0.125)
BAD = [torch.nan, torch.inf, -torch.inf, 1e30]


def make():
    return make_layer(SPEC, HEADS, DIM, pages=12)


def tokens(count, seed):
    return torch.randn(3, count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


step = partial(vllm_pages.step, config=CONFIG)


def spoiled(qkv, at, number, side=1):
    qkv = qkv.clone()
    qkv[side, at, 1, 3] = number
    return qkv


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("number", BAD)
def test_a_prompt_is_cut_where_it_can_not_be_stored(number, side):
    layer, right = make(), make()
    given, other = tokens(100, 1), tokens(50, 2)
    bad = spoiled(given, 45, number, side)
    rows = [Row(0, 100, 0, (1, 2, 3, 4)), Row(100, 150, 0, (5, 6))]
    out, cut = step(layer, rows, torch.cat([bad, other], 1))
    want, none = step(right, rows, torch.cat([given, other], 1))
    assert list(cut) == [0] and isinstance(cut[0], NonFiniteError) and none == {}
    assert out[45:100].isnan().all()
    torch.testing.assert_close(out[:45], want[:45], atol=1e-5, rtol=1e-5)
    assert torch.equal(out[100:], want[100:])
    # What other sequences have is as it was, and so is a page before the cut.
    assert torch.equal(layer.pages[[1, 5, 6]], right.pages[[1, 5, 6]])
    assert not layer.pages[[3, 4]].any()


def test_who_reads_a_damaged_page_gets_nan_until_it_is_written_anew():
    layer, right = make(), make()
    bad, good, one = spoiled(tokens(64, 3), 40, torch.nan), tokens(64, 3), tokens(1, 4)
    step(layer, [Row(0, 64, 0, (1, 2))], bad)
    # The sequence goes on, another one shares both pages, a third the page before the cut.
    rows = [Row(0, 1, 64, (1, 2, 3)), Row(1, 2, 64, (1, 2, 4)), Row(2, 3, 32, (1, 5))]
    out, cut = step(layer, rows, torch.cat([one, one, one], 1))
    assert cut == {} and out[:2].isnan().all()
    step(right, [Row(0, 64, 0, (1, 2))], good)
    want, _ = step(right, [Row(0, 1, 32, (1, 5))], one)
    assert torch.equal(out[2:], want)
    # What the first two wrote is damaged, too: here as the end of a prefix whose beginning is new.
    assert layer.damage.among((3,)) and layer.damage.among((4,))
    step(layer, [Row(0, 64, 0, (1, 2))], good)
    assert not layer.damage.among((1, 2))
    out, _ = step(layer, [Row(0, 1, 64, (1, 2, 3))], one)
    assert out.isnan().all() == layer.damage.among((3,))


@pytest.mark.parametrize("number", BAD)
def test_a_single_token_cuts_its_sequence_alone(number):
    layer, right = make(), make()
    prompts, new = tokens(60, 5), tokens(2, 6)
    before = [Row(0, 40, 0, (1, 2)), Row(40, 60, 0, (3,))]
    rows = [Row(0, 1, 40, (1, 2)), Row(1, 2, 20, (3,))]
    for one in (layer, right):
        step(one, before, prompts)
    kept = layer.pages[[1, 2]].clone()
    out, cut = step(layer, rows, spoiled(new, 0, number))
    want, _ = step(right, rows, new)
    assert list(cut) == [0] and out[0].isnan().all()
    torch.testing.assert_close(out[1], want[1], atol=1e-6, rtol=1e-6)
    assert torch.equal(layer.pages[3], right.pages[3])
    assert torch.equal(layer.pages[[1, 2]], kept)
    # The step after: the other goes on as if nothing had been.
    rows = [Row(0, 1, 41, (1, 2)), Row(1, 2, 21, (3,))]
    (out, cut), (want, _) = (step(one, rows, new) for one in (layer, right))
    assert cut == {} and out[0].isnan().all()
    assert torch.equal(out[1], want[1])


@pytest.mark.parametrize("number", BAD[:3])
def test_a_query_that_is_no_number_cuts_its_sequence(number):
    layer, given = make(), tokens(40, 7)
    out, cut = step(layer, [Row(0, 40, 0, (1, 2))], spoiled(given, 30, number, side=0))
    assert "queries" in str(cut[0])
    assert out.isnan().any(2).any(1).nonzero().flatten().tolist() == [*range(30, 40)]


def test_queries_whose_sum_overflows_are_numbers():
    layer, given = make(), tokens(40, 7)
    given[0, 3:6] = 2e38
    assert step(layer, [Row(0, 40, 0, (1, 2))], given)[1] == {}


@pytest.mark.parametrize("bad", range(9))
def test_as_many_as_can_be_are_stored(bad):
    def prepare(count):
        if count > bad:
            raise NonFiniteError("beyond")

    assert storable(prepare, 9) == bad
