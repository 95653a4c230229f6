"""Layers that are unlike: a spec for each, and those with a sliding window, which vLLM keeps."""

import pytest
from vllm_prompts import SMALL, check_that_the_pool_was_small, prompts_of_unlike_length

FOUR = "turboquant:bits=4,sinks=0"
KINDS = (["sliding_attention"] * 2 + ["full_attention"]) * 2
# Two groups of two layers with a window, and one with full attention.
GEMMA = {
    "num_hidden_layers": 6, "sliding_window": 40, "layer_types": KINDS,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(make_toy):
    return make_toy(kind="Gemma3", **GEMMA)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'default = "{FOUR}"\n[layers]\n0 = "int:bits=8,sinks=0,window=0"\n')
    return str(path)


def test_beside_layers_with_a_sliding_window_none_gives_the_tokens_of_vllm(run_vllm, gemma):
    batches = [[prompts_of_unlike_length(), 48]]
    small = {**SMALL, "kv_cache_memory_bytes": 120 * 32 * 2048}
    own = run_vllm(model=gemma, greedy=batches, **small)
    mine = run_vllm("none", model=gemma, greedy=batches, kv_cache_dtype="kvpact", **small)
    for answer in (own, mine):
        check_that_the_pool_was_small(answer)
    assert mine["greedy"] == own["greedy"]
    assert "kvpact stores K and V of 2 layers as none" in mine["log"]
    assert "kvpact leaves 4 layers with a sliding window to vLLM's own attention" in mine["log"]


def test_pages_of_layers_with_a_sliding_window_shrink_with_those_of_others(run_vllm, gemma):
    options = {
        "model": gemma, "dtype": "bfloat16", "block_size": 128, "max_model_len": 4096,
        "max_num_batched_tokens": 128,
    }  # fmt: skip
    own = run_vllm(**options)
    mine = run_vllm(FOUR, greedy=[[prompts_of_unlike_length()[:4], 8]], **options)
    # A sequence of 4,096 tokens takes 32 pages of 128 tokens, and in each of two groups the window
    # and a step: some 3 pages of 128 tokens, or 7 of 32. A page has 8,704 bytes instead of 32,768.
    assert mine["capacity"] >= 2.7 * own["capacity"] and mine["all_free"]
    assert "are empty" not in mine["log"]


def test_layers_of_a_recipe_have_pages_of_their_own_size(run_vllm, toy, recipe):
    options = {"dtype": "bfloat16", "max_model_len": 512, "model": toy}
    own = run_vllm(**options)
    mine = run_vllm(recipe, greedy=[[prompts_of_unlike_length(), 8]], **options)
    # 136 and 68 bytes of a token instead of 256 in each of two layers; whole pages are counted.
    assert mine["capacity"] == pytest.approx(own["capacity"] * 512 / 204, rel=1e-3)
    assert mine["all_free"]
    assert "K and V of 1 layers as int:bits=8,sinks=0,window=0: 136 bytes" in mine["log"]
    assert f"K and V of 1 layers as {FOUR}: 68 bytes" in mine["log"]


def test_models_without_full_attention_are_refused(run_vllm, make_toy):
    model = make_toy(kind="Mistral", sliding_window=64)
    log = run_vllm(FOUR, fails=True, model=model, dtype="bfloat16", max_model_len=512)["log"]
    assert "does not cover models whose layers all have a sliding window" in log
