"""Free running: the exact cache's greedy text, and each cache's distance from it, step by step."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tiny_llama import tiny_llama
from transformers import DynamicCache

from kvpact.evaluate import evaluate, free_running, score_tokens, write_report
from kvpact.evaluate.base import Candidate, EvaluationError
from kvpact.evaluate.free_running import distinct_percent, running_mean
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named


@pytest.fixture(scope="module")
def model():
    return tiny_llama(256, bos_token_id=None, eos_token_id=None)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 128, (120,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def result(model, prompt):
    return free_running(model, prompt, ["none", "int:bits=4", "int:bits=2"], steps=24, chunk=40)


def test_the_text_is_the_models_greedy_one(model, prompt, result):
    wanted = model.generate(prompt[None], max_new_tokens=24, do_sample=False)[0, 120:]
    assert list(result.token_ids) == wanted.tolist()
    assert (result.prompt_tokens, result.steps) == (120, 24)


def test_scores_are_those_of_steps_fed_by_hand(model, prompt, result):
    spec = "int:bits=2"
    coded, exact = CompressedCache(model.config, spec), DynamicCache(config=model.config)
    pieces = [*prompt.split(40), *(torch.tensor([token]) for token in result.token_ids[:-1])]
    kl, differs = [], []
    with torch.inference_mode():
        for piece in pieces:
            both = (model(piece[None], **named(cache)).logits for cache in (exact, coded))
            logits, other = (x[0, -1:] for x in both)
            scores = score_tokens(logits, other, logits.argmax(-1))
            kl.append(scores.kl.item())
            differs.append(not scores.agree.item())
    row = result.rows[2]
    assert row.kl == pytest.approx(kl[2:], rel=1e-6)
    assert row.kl_mean == pytest.approx(sum(kl[2:]) / 24)
    assert row.kl_first == pytest.approx(sum(kl[2:8]) / 6)
    assert row.kl_last == pytest.approx(sum(kl[-6:]) / 6)
    assert row.first_divergence == differs[2:].index(True) + 1
    assert row.top1 == pytest.approx(100 - 100 * sum(differs[2:]) / 24)


def test_the_exact_cache_never_differs(result):
    none, four, two = result.rows
    assert none.spec == "none" and none.first_divergence is None and none.top1 == 100
    assert max(none.kl) < 1e-9 < four.kl_mean < two.kl_mean


def test_a_text_ends_where_the_exact_cache_ends_it(model, prompt, result, monkeypatch):
    end = result.token_ids[5]
    steps = result.token_ids.index(end) + 1
    for value in (end, [end, 127]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", value)
        shorter = free_running(model, prompt, ["none"], steps=24, chunk=40)
        assert shorter.token_ids == result.token_ids[:steps]
        assert len(shorter.rows[0].kl) == steps


def test_packed_only_is_harsher_and_progress_counts_every_feed(model, prompt):
    seen = []
    specs = ["int:bits=3", Candidate("int:bits=3", packed_only=True)]
    options = {"steps": 4, "chunk": 40, "progress": lambda *step: seen.append(step)}
    plain, packed = free_running(model, prompt, specs, **options).rows
    assert packed.packed_only and packed.kl_mean > plain.kl_mean
    assert [done for done, _, _ in seen] == list(range(1, 13))
    assert {total for _, total, _ in seen} == {12}


@pytest.mark.parametrize(
    ("steps", "chunk", "words"),
    [(0, 40, "0 steps"), (4, 0, "chunks of 0"), (137, 40, "at most 119 tokens, or fewer steps")],
)
def test_steps_that_are_not_possible(model, prompt, steps, chunk, words):
    with pytest.raises(EvaluationError, match=words):
        free_running(model, prompt, ["none"], steps=steps, chunk=chunk)


def test_circles_are_seen():
    assert distinct_percent(range(100)) == 100
    assert distinct_percent([1, 2, 3] * 30) == pytest.approx(100 * 3 / 83)
    assert distinct_percent([1]) == 100


def test_running_mean():
    assert running_mean([4.0, 2.0, 0.0]) == [4, 3, 2] and running_mean([1.0] * 40)[-1] == 1
    assert running_mean([16.0] + [0.0] * 16)[-2:] == [1, 0]


def test_report_has_table_curve_and_numbers(model, prompt, result, tmp_path):
    run = evaluate(model, prompt, ["int:bits=4", "int:bits=2"], chunk=40, model_name="tiny")
    files = write_report(replace(run, free_running=result), tmp_path)
    assert [path.name for path in files[-2:]] == ["free_running.json", "free_running.png"]
    (data,) = json.loads(files[-2].read_text("utf-8"))
    assert (data["model"], data["tokens"]) == ("tiny", 120)
    assert data["token_ids"] == list(result.token_ids)
    assert data["rows"][2]["kl"] == pytest.approx(result.rows[2].kl)
    text = (tmp_path / "eval.md").read_text("utf-8")
    assert f"step {result.rows[2].first_divergence} |" in text and "none in 24" in text
    with Image.open(files[-1]) as image:
        image.load()
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
