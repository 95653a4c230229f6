"""Prefixes that one engine saves and another one loads: the tokens of engines without a store."""

import pytest
from vllm_engine import sharing
from vllm_prompts import ids

from kvpact.stores import open_store

OPTIONS = {"dtype": "float32", "max_model_len": 512}
SHARED = 256
"""Tokens, four chunks of 64."""


@pytest.fixture(scope="module")
def prompts():
    shared = ids(SHARED, seed=0)
    return [shared + ids(10 + 7 * i, seed=1 + i) for i in range(4)]


def one_by_one(prompts):
    return [[[prompt], 24] for prompt in prompts]


def check_shared(run_vllm, spec, prompts, store, **options):
    """One engine saves a prefix and another one loads it; return what both answered."""
    first, others = one_by_one(prompts[:1]), one_by_one(prompts[1:])
    # Without a store the others' prefix comes from vLLM's own prefix cache.
    without = run_vllm(spec, greedy=first + others, **options)
    saving = run_vllm(spec, greedy=first, **options, **store)
    loading = run_vllm(spec, greedy=others, **options, **store)
    assert saving["greedy"] + loading["greedy"] == without["greedy"]
    assert loading["metrics"]["vllm:kvpact_loaded_tokens"] == SHARED
    assert 'vllm:kvpact_load_time_seconds_count{engine="0"' in loading["scraped"]
    assert "vllm:kvpact_save_time_seconds_sum" in saving["scraped"]
    return saving, loading


@pytest.mark.parametrize("spec", ["none", "turboquant:bits=4,sinks=0"])
def test_a_second_engine_loads_what_the_first_computed(run_vllm, toy, tmp_path, prompts, spec):
    store = sharing(tmp_path / "store")
    saving, loading = check_shared(
        run_vllm, spec, prompts, store, model=toy, kv_cache_dtype="kvpact", **OPTIONS
    )
    assert loading["metrics"]["vllm:external_prefix_cache_hits"] == SHARED
    assert saving["all_free"] and loading["all_free"]


def test_pages_of_a_recipe_by_layer_are_shared(run_vllm, toy, tmp_path, prompts):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('default = "turboquant:bits=4,sinks=0"\n[layers]\n0 = "int:bits=8,sinks=0"\n')
    store = sharing(tmp_path / "store")
    check_shared(run_vllm, str(recipe), prompts, store, model=toy, **OPTIONS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllm_own_pages_are_stored_by_a_spec(run_vllm, toy, tmp_path, prompts, dtype):
    """With `none` nothing is lost: pages get back what vLLM's kernel wrote, wherever it lies."""
    store = sharing(tmp_path / "store", storage="none:sinks=0")
    check_shared(run_vllm, None, prompts, store, model=toy, **OPTIONS | {"dtype": dtype})


def test_tensor_parallel_ranks_share_their_own_heads(run_vllm, toy, tmp_path, prompts):
    options = {"model": toy, "tensor_parallel_size": 2, "processes": True, **OPTIONS}
    options |= {"greedy": one_by_one(prompts[:1]), **sharing(tmp_path / "store")}
    saving, loading = run_vllm("none", **options), run_vllm("none", **options)
    assert saving["greedy"] == loading["greedy"]
    assert loading["metrics"]["vllm:kvpact_loaded_tokens"] == 2 * SHARED
    with open_store(tmp_path / "store") as store:
        assert len(store) == 2 * (SHARED // 64)


def test_what_another_model_saved_is_not_loaded(run_vllm, toy, make_toy, tmp_path, prompts):
    batches, other = one_by_one(prompts[:1]), make_toy(initializer_range=0.1)
    run_vllm("none", model=other, greedy=batches, **OPTIONS, **sharing(tmp_path / "store"))
    without = run_vllm("none", model=toy, greedy=batches, **OPTIONS)
    answer = run_vllm("none", model=toy, greedy=batches, **OPTIONS, **sharing(tmp_path / "store"))
    assert answer["greedy"] == without["greedy"]
    assert answer["metrics"]["vllm:kvpact_loaded_tokens"] == 0
    with open_store(tmp_path / "store") as store:
        assert len(store) == 2 * (SHARED // 64)
