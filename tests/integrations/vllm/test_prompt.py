"""Prompts over scratch pages, by a kernel of plain torch: what vLLM's own is expected to do."""

import pytest
import torch
from closeness import bound_of, error
from vllm_pages import batch_of, both_ways, make_layer, random_qkv

from kvpact.contract import AttendConfig
from kvpact.integrations.pages.prompt import FEW, PAGE, Scratch
from kvpact.integrations.pages.window import Row

SPECS = (
    "none:sinks=0,window=0", "turboquant:bits=4,sinks=0", "int:bits=4,sinks=0,window=5",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false,sinks=0,window=0",
    "turboquant:bits=3,sinks=0,window=0/fp8:sinks=0,window=0",
)  # fmt: skip
HEADS, GROUPS, DIM = 2, 2, 64
CONFIGS = (AttendConfig(softmax_scale=0.125), AttendConfig(softmax_scale=0.3, softcap=2.0))


class TorchKernel:
    """A kernel of prompts that reads pages to their ends, as vLLM's does."""

    def put(self, k, v, pages, slots):
        for x, of_all in zip((k, v), pages, strict=True):
            of_all[slots // PAGE, :, slots % PAGE] = x

    def schedule(self, sequences):
        return sequences.lengths.tolist()

    def attend(self, q, pages, sequences, schedule, config, out):
        starts = sequences.starts.tolist()
        for i, length in enumerate(schedule):
            start, end = starts[i], starts[i + 1]
            table = sequences.tables[i, : -(-length // PAGE)]
            # [pages, H, PAGE, D] -> [H, tokens, D]
            k, v = (x[table].transpose(0, 1).flatten(1, 2).float() for x in pages)
            k, v = (x.repeat_interleave(GROUPS, 0) for x in (k, v))
            scores = q[start:end].transpose(0, 1).float() @ k.mT * config.softmax_scale
            if config.softcap:
                scores = config.softcap * torch.tanh(scores / config.softcap)
            seen = torch.arange(k.shape[1]) <= torch.arange(length - end + start, length)[:, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = (weights @ v).transpose(0, 1)


def make_scratch(dtype, tokens=1300):
    scratch = Scratch(TorchKernel(), HEADS, DIM, dtype, tokens)
    for x in scratch.pages:
        x.fill_(torch.nan)
    return scratch


BATCHES = (
    [(0, 1101)], [(0, 1), (1, FEW + 1)], [(1, 1), (0, 70), (2, 17)], [(2, FEW), (1, 95), (0, 51)],
    [(2, 1), (1, 1), (0, 1)],
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("text", SPECS)
def test_a_kernel_of_exact_pages_gives_what_packed_slots_give(text, dtype, config):
    # In bf16 decoded numbers are rounded once more, and so is the output.
    limit = bound_of(text) if dtype is torch.float32 else 1e-2
    shape = (HEADS * GROUPS, HEADS, DIM)
    for out, right in both_ways(text, make_scratch(dtype), shape, dtype, config, BATCHES):
        assert error(right.float(), out.float()) <= limit


def test_rows_side_by_side_are_one_call_as_far_as_the_pages_reach():
    scratch = make_scratch(torch.float32, tokens=5 * PAGE)
    counts = [(0, 1), (1, 200), (2, PAGE), (3, FEW), (4, 40), (5, 2 * PAGE + 1), (6, PAGE), (7, 33)]
    held = [9, 0, 0, 0, PAGE, 0, PAGE, 0]
    rows = batch_of(counts, held, [list(range(100))] * 8)
    runs = scratch.plan(rows)
    assert [run.rows for run in runs] == [rows[1:3], rows[4:6], rows[6:]]
    assert [(run.start, run.end) for run in runs] == [(1, 329), (361, 658), (658, 819)]
    first, second, third = (run.sequences for run in runs)
    assert first.tables.tolist() == [[0, 1], [2, 3]]
    assert second.starts.tolist() == [0, 40, 297]
    assert second.lengths.tolist() == [PAGE + 40, 2 * PAGE + 1]
    assert second.tables.tolist() == [[0, 1, 2], [2, 3, 4]]
    assert third.lengths.tolist() == [2 * PAGE, 33]
    assert [int(places[0]) for places in runs[1].places] == [0, 2 * PAGE]


def two_prompts(tokens=80):
    """A layer, scratch pages, two prompts of 40 tokens, and so many tokens."""
    qkv = [x.clone() for x in random_qkv(tokens, 4, HEADS, DIM, 1, torch.float32)]
    rows = [Row(0, 40, 0, (3, 4)), Row(40, 80, 0, (5, 6))]
    return make_layer(SPECS[1], HEADS, DIM), make_scratch(torch.float32), rows, qkv


def test_a_prompt_with_a_token_that_is_refused_is_not_written_to_scratch_pages():
    layer, scratch, rows, (q, k, v) = two_prompts()
    v[33, 1, 5] = torch.inf
    out = torch.zeros_like(q)
    assert list(layer.step(rows, q, k, v, out, CONFIGS[0], scratch.plan(rows))) == [0]
    # Nor is the one beside it: what is left of both is attended over what is given.
    assert out[33:40].isnan().all()
    assert out[:33].isfinite().all() and out[40:].isfinite().all()
    assert all(x.isnan().all() for x in scratch.pages)


def test_a_query_that_is_no_number_is_the_kernels_own_affair():
    layer, scratch, rows, (q, k, v) = two_prompts()
    right, out, want = two_prompts()[0], torch.zeros_like(q), torch.zeros_like(q)
    right.step(rows, q, k, v, want, CONFIGS[0])
    q[33, 1, 5] = torch.nan
    assert layer.step(rows, q, k, v, out, CONFIGS[0], scratch.plan(rows)) == {}
    # That head of that token is NaN, as from an exact cache; its K and V are stored.
    assert out.isnan().any(2).nonzero().tolist() == [[33, 1]]
    assert torch.equal(layer.pages[3:7], right.pages[3:7])
    out[33, 1] = want[33, 1]
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_beside_a_prompt_that_is_cut_a_query_that_is_no_number_cuts_its_own():
    layer, scratch, rows, (q, k, v) = two_prompts(120)
    q[50, 0, 0], v[33, 1, 5] = torch.nan, torch.inf
    rows, out = [*rows, Row(80, 120, 0, (7, 8))], torch.zeros_like(q)
    cut = layer.step(rows, q, k, v, out, CONFIGS[0], scratch.plan(rows))
    assert list(cut) == [0, 40]
    lost = out.isnan().any(2).any(1).nonzero().flatten().tolist()
    assert lost == [*range(33, 40), *range(50, 80)]
