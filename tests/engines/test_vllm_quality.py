"""Log-probabilities of a real model over compressed pages, beside those of `kvpact eval`."""

import pytest
import torch

from kvpact.data import book_path
from kvpact.evaluate import Candidate, evaluate
from kvpact.integrations.models import SMOLLM2, first_tokens, load_model, packaged_folder
from kvpact.integrations.transformers import calibrate
from kvpact.spec import parse_spec

SPECS = ("int:bits=8,sinks=0,window=0", "turboquant:bits=4,sinks=0", "recipe.toml")
CALIBRATED = "trellis:bits=4,sinks=0"
RECIPE = """
default = "int:bits=8,sinks=0,window=0"
[layers]
3 = "turboquant:bits=3,sinks=0"
-1 = "turboquant:bits=4,sinks=0,window=0/fp8:sinks=0,window=0"
"""
CHUNK = 256
# Two chunks of a prompt, and the token behind them: 256 tokens are read over a stored past.
TOKENS = 2 * CHUNK + 1
OPTIONS = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": CHUNK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def in_folder(folder, spec):
    return str(folder / spec) if spec and spec.endswith(".toml") else spec


@pytest.fixture(scope="module")
def expected(folder):
    """What `kvpact eval` gives: the text, and by spec each token's gain in log-probability."""
    model, tokenizer = load_model(SMOLLM2.name)
    ids = first_tokens(tokenizer, book_path().read_text("utf-8"), TOKENS)
    later = first_tokens(tokenizer, book_path().read_text("utf-8"), TOKENS + 2048)[TOKENS:]
    learnt = calibrate(model, [later], [parse_spec(CALIBRATED)])
    learnt.save(folder / "model.kvcal")
    specs = [
        *(in_folder(folder, spec) for spec in SPECS),
        Candidate(CALIBRATED, calibration=learnt),
    ]
    result = evaluate(model, ids, specs, chunk=CHUNK)
    scores = dict(zip(("none", *SPECS, CALIBRATED), result.scores, strict=True))
    return ids.tolist(), {name: one.ref_nll - one.nll for name, one in scores.items()}


def run(run_vllm, expected, spec=None, processes=False, **more):
    ids, _ = expected
    prompts = [ids[start : start + 40 + start] for start in range(0, 80, 10)]
    return run_vllm(
        spec, processes=processes, model=str(packaged_folder(SMOLLM2)), forced=[ids],
        greedy=[[prompts, 24]], **OPTIONS, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def own(run_vllm, expected):
    # As users start it: with a process for the engine, and one for the worker.
    return run(run_vllm, expected, processes=True)


def test_with_none_a_real_model_gives_the_tokens_of_vllm(run_vllm, expected, own):
    mine = run(run_vllm, expected, "none", processes=True)
    assert mine["greedy"] == own["greedy"]
    torch.testing.assert_close(
        torch.tensor(mine["forced"]), torch.tensor(own["forced"]), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("spec", [*SPECS, CALIBRATED])
def test_log_probabilities_change_by_what_eval_gives(run_vllm, expected, own, folder, spec):
    more = {}
    if spec == CALIBRATED:
        env = {"KVPACT_VLLM_CALIBRATION": str(folder / "model.kvcal")}
        more = {"env": env, "block_size": 64}
    mine = run(run_vllm, expected, in_folder(folder, spec), **more)
    change = torch.tensor(mine["forced"][0], dtype=torch.float64) - torch.tensor(own["forced"][0])
    change, right = change[-CHUNK:], expected[1][spec]
    assert len(change) == len(right) == CHUNK
    got, most = (float(x.square().mean().sqrt()) for x in (change, right))
    print(f"{spec}: {got:.6f} nats rms in vLLM, {most:.6f} in eval")
    assert got <= 1.05 * most
    assert abs(float(change.mean() - right.mean())) <= 0.1 * most
