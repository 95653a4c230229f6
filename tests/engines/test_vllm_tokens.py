"""The answers of vLLM with kvpact's pages: its own where nothing is lost."""

import pytest
from vllm_prompts import SMALL, check_that_the_pool_was_small, prompts_of_unlike_length


@pytest.fixture(scope="module")
def batches():
    prompts = prompts_of_unlike_length()
    return [[prompts, 48], [prompts[::-1], 8]]


@pytest.fixture(scope="module")
def own(run_vllm, toy, batches):
    return run_vllm(model=toy, greedy=batches, **SMALL)


def test_with_none_the_tokens_are_those_of_vllm(run_vllm, toy, batches, own):
    mine = run_vllm("none", model=toy, greedy=batches, kv_cache_dtype="kvpact", **SMALL)
    for answer in (own, mine):
        check_that_the_pool_was_small(answer)
    assert mine["greedy"] == own["greedy"] and mine["capacity"] == own["capacity"]
    assert "kvpact stores K and V of 2 layers as none: 512 bytes" in mine["log"]
    assert "kvpact" not in own["log"]


@pytest.mark.parametrize("spec", [
    "turboquant:bits=4,sinks=0",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false,sinks=0,window=0",
    "fp8:sinks=0,window=0",
])  # fmt: skip
def test_compressed_pages_are_all_given_back(run_vllm, toy, batches, spec):
    small = {**SMALL, "kv_cache_memory_bytes": SMALL["kv_cache_memory_bytes"] // 6}
    answer = run_vllm(spec, model=toy, greedy=batches, **small)
    check_that_the_pool_was_small(answer)
    assert [len(tokens) for tokens in answer["greedy"][0]] == [48] * 32


def test_two_ranks_give_the_tokens_of_one(run_vllm, toy, batches, own):
    small = {**SMALL, "kv_cache_memory_bytes": SMALL["kv_cache_memory_bytes"] // 2}
    mine = run_vllm("none", model=toy, greedy=batches, tensor_parallel_size=2, **small)
    # Each rank has pages for half of the heads: half of the bytes hold as many tokens.
    assert mine["capacity"] == own["capacity"]
    check_that_the_pool_was_small(mine)
    assert mine["greedy"] == own["greedy"]
