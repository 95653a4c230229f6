"""Requests whose tokens can't be stored: the engine goes on, and the others notice nothing."""

import shutil
from pathlib import Path

import pytest
import torch
from vllm_prompts import prompts_of_unlike_length

BAD = 7
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def spoiled(toy, tmp_path_factory):
    """A model that computes NaN of one token."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("spoiled") / "model"
    shutil.copytree(toy, folder)
    weights = load_file(Path(toy) / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def prompts():
    """Those without the token, and one with it behind a page and a half."""
    clean = [[8 if t == BAD else t for t in one] for one in prompts_of_unlike_length()[:12]]
    return clean, [*clean[0][:48], BAD, *clean[0][48:]]


def test_answers_of_others_are_those_of_vllm(run_vllm, spoiled, prompts):
    clean, bad = prompts
    own = run_vllm(model=spoiled, greedy=[[clean, 16]], **OPTIONS)
    # The third batch finds pages of the second in vLLM's prefix cache, the damaged ones too.
    batches = [[clean, 16], [[*clean, bad], 16], [[bad + clean[1], *clean], 16]]
    mine = run_vllm("none", model=spoiled, greedy=batches, **OPTIONS)
    alone, before, after = mine["greedy"]
    assert alone == before[:-1] == after[1:] == own["greedy"][0]
    # Nothing but the first number is larger than none: what vLLM makes of NaN.
    assert before[-1] == after[0] == [0] * 16
    assert mine["metrics"]["vllm:prefix_cache_hits"] > 0 and mine["all_free"]
    assert "Requests cut so far: 1" in mine["log"]


def test_a_request_that_is_cut_changes_no_other_answer(run_vllm, spoiled, prompts, tmp_path):
    """In processes of their own; the metrics of all of them show the cut requests, and pages."""
    clean, bad = prompts
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    mine = run_vllm(
        "turboquant:bits=4,sinks=0",
        model=spoiled,
        greedy=[[clean, 16], [[bad, *clean, bad], 16], [clean, 16]],
        processes=True,
        env=env,
        # In one step, so that a prompt's parts are the same whoever is beside it.
        **{**OPTIONS, "max_num_batched_tokens": 4096, "enable_prefix_caching": False},
    )
    before, among, after = mine["greedy"]
    assert among[1:-1] == before == after
    assert "kvpact could not store a token in model.layers.0.self_attn.attn" in mine["log"]
    assert "Requests cut so far: 2" in mine["log"] and mine["all_free"]
    labels = (
        f'dtype="float32",engine="0",layers="2",model_name="{spoiled}",'
        'spec="turboquant:bits=4,sinks=0"'
    )
    # Two heads' K and V of 64 numbers in 68 bytes, 32 tokens; fp32 would take 512 bytes a head.
    for name, value in ("page_bytes", 4352), ("page_tokens", 32), ("capacity_ratio", 512 / 68):
        assert f"vllm:kvpact_{name}{{{labels}}} {float(value)}\n" in mine["scraped"]
    corrupted = f'vllm:corrupted_requests_total{{engine="0",model_name="{spoiled}"}} 2.0\n'
    assert corrupted in mine["scraped"]
