"""The answers of vLLM with kvpact's pages: its own where nothing is lost."""

import pytest
import torch

# So small a pool that sequences are preempted, and so few tokens a step that prompts are chunked.
SMALL = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 40 * 32 * 2048,
}


def prompts_of_unlike_length():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 512, (96,), generator=generator).tolist()
    lengths = torch.randint(1, 200, (32,), generator=generator).tolist()
    own = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    return [shared + one if i % 3 == 0 else one for i, one in enumerate(own)]


@pytest.fixture(scope="module")
def batches():
    prompts = prompts_of_unlike_length()
    return [[prompts, 48], [prompts[::-1], 8]]


@pytest.fixture(scope="module")
def own(run_vllm, toy, batches):
    return run_vllm(model=toy, greedy=batches, **SMALL)


def check_that_the_pool_was_small(answer):
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    assert answer["metrics"]["vllm:prefix_cache_hits"] > 0
    assert answer["all_free"]


def test_with_none_the_tokens_are_those_of_vllm(run_vllm, toy, batches, own):
    mine = run_vllm("none", model=toy, greedy=batches, **SMALL)
    for answer in (own, mine):
        check_that_the_pool_was_small(answer)
    assert mine["greedy"] == own["greedy"]
    assert mine["capacity"] == own["capacity"]
    assert "kvpact stores K and V of 2 layers as none: 512 bytes" in mine["log"]
    assert "kvpact" not in own["log"]


@pytest.mark.parametrize(
    "spec",
    [
        "turboquant:bits=4,sinks=0",
        "trellis:bits=4,center=0,first=false,weights=false,blocks=false,sinks=0,window=0",
        "fp8:sinks=0,window=0",
    ],
)
def test_compressed_pages_are_all_given_back(run_vllm, toy, batches, spec):
    small = {**SMALL, "kv_cache_memory_bytes": SMALL["kv_cache_memory_bytes"] // 6}
    answer = run_vllm(spec, model=toy, greedy=batches, **small)
    check_that_the_pool_was_small(answer)
    assert [len(tokens) for tokens in answer["greedy"][0]] == [48] * 32
