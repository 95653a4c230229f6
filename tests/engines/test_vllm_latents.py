"""Multi-head latent attention (MLA) over pages of packed latents, beside vLLM's own on a CPU."""

import pytest
import torch
import transformers
from vllm_prompts import SMALL, check_that_the_pool_was_small, ids, prompts_of_unlike_length

from kvpact.evaluate import evaluate

INT8 = "int:bits=8,sinks=0,window=0"
CHUNK = 128
PROMPT = ids(2 * CHUNK + 1, seed=3)
# vLLM's reference for fp32: neither chunks of prompts nor a prefix cache, pages of 16 tokens.
OWN = {"attention_backend": "CPU_MLA", "max_num_batched_tokens": 1024}
LATENTS = {
    "kind": "DeepseekV2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    # vLLM 0.32 rotates wrongly on a CPU without YaRN (docs/vllm.md).
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM gives latents pages of 16 tokens where there is no AMX, and kvpact refuses these",
)


@pytest.fixture(scope="module")
def latents(make_toy):
    return make_toy(**LATENTS)


@pytest.fixture(scope="module")
def asked():
    return {"greedy": [[prompts_of_unlike_length(), 24]], "forced": [PROMPT]}


@amx
def test_with_none_the_tokens_are_those_of_vllm(run_vllm, latents, asked):
    own = run_vllm(model=latents, **asked, **{**SMALL, **OWN})
    mine = run_vllm("none", model=latents, **asked, **SMALL)
    check_that_the_pool_was_small(mine)
    assert mine["greedy"] == own["greedy"]
    torch.testing.assert_close(
        torch.tensor(mine["forced"]), torch.tensor(own["forced"]), atol=5e-4, rtol=0
    )
    assert "latents and rotated keys of 2 layers as none: 2304 bytes per token" in mine["log"]


# vLLM's own backends take the first of these widths only.
@amx
@pytest.mark.parametrize("widths", [(512, 64), (64, 32)])
def test_log_probabilities_change_by_what_eval_gives(run_vllm, make_toy, widths):
    folder = make_toy(
        **LATENTS | dict(zip(("kv_lora_rank", "qk_rope_head_dim"), widths, strict=True))
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    score = evaluate(model, torch.tensor(PROMPT), [INT8], chunk=CHUNK).scores[-1]
    mine = run_vllm(
        INT8, model=folder, forced=[PROMPT], **SMALL | {"max_num_batched_tokens": CHUNK}
    )
    exact, right = (-x[-CHUNK:] for x in (score.ref_nll, score.nll))
    got = torch.tensor(mine["forced"][0][-CHUNK:], dtype=torch.float64)
    change, most = (float((x - exact).square().mean().sqrt()) for x in (got, right))
    print(f"{change:.6f} nats rms in vLLM, {most:.6f} in eval")
    assert 0 < change <= 1.05 * most


@amx
def test_four_bits_hold_so_many_times_the_tokens_of_bfloat16(run_vllm, latents):
    options = {"model": latents, "dtype": "bfloat16", "max_model_len": 512, "forced": [PROMPT]}
    own, mine = (run_vllm(spec, **options) for spec in (None, "turboquant:bits=4,sinks=0"))
    assert mine["capacity"] >= 3.4 * own["capacity"]
    # A prompt that fits into one step reads nothing that is stored.
    torch.testing.assert_close(
        torch.tensor(mine["forced"]), torch.tensor(own["forced"]), atol=0.5, rtol=0
    )


def test_the_reference_is_refused_by_name(run_vllm, latents):
    options = {"model": latents, "max_model_len": 512, "attention_backend": "CPU_MLA"}
    log = run_vllm("none", fails=True, **options)["log"]
    assert "does not cover multi-head latent attention (MLA) but in the place of AMX_MLA" in log
