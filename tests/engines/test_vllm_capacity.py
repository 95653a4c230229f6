"""What vLLM itself reports as its capacity, and what it refuses when it starts."""

import pytest
import torch
from vllm_prompts import ids

SPEC = "turboquant:bits=4,sinks=0"


@pytest.mark.parametrize(("dim", "times"), [(64, 3.4), (128, 3.6)])
def test_four_bits_hold_so_many_times_the_tokens_of_bfloat16(run_vllm, make_toy, dim, times):
    options = {"model": make_toy(dim), "dtype": "bfloat16", "max_model_len": 512}
    prompt = ids(300, seed=1)
    own = run_vllm(forced=[prompt], **options)
    mine = run_vllm(SPEC, forced=[prompt], kv_cache_dtype="kvpact", **options)
    assert mine["capacity"] >= times * own["capacity"]
    assert f"pages for {mine['capacity']:,} tokens" in mine["log"]
    assert f"as {SPEC}: " in mine["log"]
    assert "keeps the last 64 tokens of each sequence exactly, outside the pages" in mine["log"]
    # A prompt that fits into one step reads nothing that is stored.
    by_vllm = "attends prompts by vLLM's own kernel (AMX)" in mine["log"]
    assert by_vllm == ("attends prompts by its own kernels" not in mine["log"])
    if by_vllm:
        assert mine["forced"] == own["forced"]
    else:  # each rounds in its own way: ours is no further from fp32 than vLLM's
        exact = run_vllm(forced=[prompt], **options | {"dtype": "float32"})
        right, ours, theirs = (torch.tensor(x["forced"]) for x in (exact, mine, own))
        error, most = (float((x - right).square().mean().sqrt()) for x in (ours, theirs))
        print(f"{error:.6f} nats rms by kvpact's kernels, {most:.6f} by vLLM's")
        assert 0 < error <= 1.1 * most


@pytest.mark.parametrize("processes", [False, True])
def test_the_name_of_its_pages_alone_is_the_default_spec(run_vllm, toy, calibrated, processes):
    env = {"KVPACT_VLLM_CALIBRATION": str(calibrated(toy))}
    options = {"model": toy, "max_model_len": 512, "block_size": 128, "env": env}
    log = run_vllm(kv_cache_dtype="kvpact", processes=processes, **options)["log"]
    assert "kvpact stores K and V of 2 layers as trellis:bits=4,sinks=0: " in log


@pytest.mark.parametrize(("spec", "options", "reason"), [
    ("turboquant:bits=4", {}, "write 'turboquant:bits=4,sinks=0'"),
    ("kivi:sinks=0,window=0", {}, "packs 32 tokens together"),
    # vLLM 0.33 refuses it first where its kernels are not for it.
    (SPEC, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    (SPEC, {"block_size": 16}, "needs a multiple of 32"),
    (
        SPEC,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "does not cover speculative decoding",
    ),
], ids=["sinks", "groups", "fp8", "block size", "speculative"])  # fmt: skip
def test_what_is_not_covered_is_refused_by_name(run_vllm, toy, spec, options, reason):
    options = {"model": toy, "dtype": "bfloat16", "max_model_len": 512, **options}
    assert reason in run_vllm(spec, fails=True, **options)["log"]
