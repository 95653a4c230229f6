"""200 random requests, aborts in the middle, over a pool so small that sequences are preempted."""

import pytest
import vllm_prompts
from vllm_engine import sharing
from vllm_prompts import random_requests

SMALL = vllm_prompts.SMALL | {"max_num_seqs": 8, "kv_cache_memory_bytes": 30 * 32 * 2048}


def run(start_vllm, toy, requests, spec="none", **options):
    with start_vllm(spec, model=toy, **{**SMALL, **options}) as engine:
        answers = engine.ask("sequence", requests=requests)
        metrics = engine.ask("metrics")
        assert engine.ask("forget")  # no page is held any more
    for one, answer in zip(requests, answers, strict=True):
        assert (answer is None) == (one["aborted"] is not None)
        assert answer is None or len(answer) == one["tokens"]
    assert metrics["vllm:num_preemptions"] > 0
    return answers, metrics


@pytest.fixture(scope="module")
def requests():
    return random_requests(seed=3)


@pytest.fixture(scope="module")
def answers(start_vllm, toy, requests):
    """Those of an engine that shares nothing."""
    answers, metrics = run(start_vllm, toy, requests, enable_prefix_caching=False)
    assert metrics["vllm:prefix_cache_hits"] == 0
    return answers


def test_with_shared_prefixes_all_answers_are_the_same_and_all_pages_free(
    start_vllm, toy, requests, answers
):
    mine, metrics = run(start_vllm, toy, requests)
    assert metrics["vllm:prefix_cache_hits"] > 0
    assert mine == answers


@pytest.mark.parametrize(("spec", "extra"), [
    ("none", {}), (None, {"storage": "none:sinks=0"}),
], ids=["kvpact's pages", "vLLM's own pages"])  # fmt: skip
def test_with_a_store_all_answers_are_the_same_and_all_pages_free(
    start_vllm, toy, requests, answers, tmp_path, spec, extra
):
    shared = sharing(tmp_path / "store", **extra)
    mine, metrics = run(start_vllm, toy, requests, spec, **shared)
    # Of prefixes that the small pool has no room for any more.
    assert metrics["vllm:external_prefix_cache_hits"] > 0
    assert metrics["vllm:kvpact_loaded_tokens"] > 0
    assert mine == answers


def test_compressed_pages_that_are_shared_through_a_store_are_all_free_at_the_end(
    start_vllm, toy, requests, tmp_path
):
    small = {"kv_cache_memory_bytes": SMALL["kv_cache_memory_bytes"] // 7}
    spec, shared = "turboquant:bits=4,sinks=0", sharing(tmp_path / "store")
    _, metrics = run(start_vllm, toy, requests, spec, **small, **shared)
    assert metrics["vllm:external_prefix_cache_hits"] > 0
