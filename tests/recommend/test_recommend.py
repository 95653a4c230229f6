"""`kvpact recommend` from a model to a recipe that loads."""

import json

import pytest
import torch
from commands import good, invoke
from PIL import Image
from transformers import AutoModelForCausalLM

from kvpact.cache import planned_bytes
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.record import SeenLayer
from kvpact.recipe import layer_specs
from kvpact.recommend import Measured, RecommendationError, plan, verify
from kvpact.recommend.notes import bad_notes, outlier_notes
from kvpact.spec import parse_spec


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 128, (300,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def planned(model, ids):
    # Between 3 and 4 bits in all layers.
    return plan(model, ids[:256], context=4096, budget="25%")


def test_a_plan_ranks_specs_and_keeps_to_its_budget(planned):
    assert [x.total for x in planned.measured] == sorted(x.total for x in planned.measured)
    total = {x.spec: x.total for x in planned.measured}
    assert total["int:bits=8"] < total["trellis:bits=4"] < total["trellis:bits=3"]
    assert total["trellis:bits=3"] < total["trellis:bits=2"]
    assert total["kivi:bits=4"] < total["kivi:bits=2"]
    exact = 2 * 2 * 2 * (32 + 32) * 4096  # layers, heads, bytes, widths
    assert planned.sizes.exact == exact and planned.budget == exact // 4
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float16)
    held = sum(
        planned_bytes(spec, geometry, 4096)["total"] for spec in layer_specs(planned.recipe, 2)
    )
    assert planned.recipe_bytes == held <= planned.budget
    assert planned.bytes_of(planned.uniform) <= planned.budget
    assert set(planned.layers.values()) <= {"trellis:bits=2", "trellis:bits=3", "trellis:bits=4"}
    (kivi,) = (x for x in planned.measured if x.spec == "kivi:bits=4")
    assert kivi.slot_bits == 5.0


def test_more_budget_never_costs_more(model, ids):
    plans = [
        plan(model, ids[:192], context=4096, budget=budget) for budget in ("20%", "35%", "100%")
    ]
    costs = []
    for found in plans:
        assert found.recipe_bytes <= found.budget
        by_spec = {x.spec: x for x in found.measured}
        costs.append(sum(by_spec[s].cost(i) for i, s in found.layers.items() if s in by_spec))
    assert costs[0] > costs[1] > costs[2] == 0
    assert plans[2].recipe == "none"


def test_the_better_one_is_chosen(model, ids, planned):
    found = verify(model, ids, planned, chunk=128)
    kl = {row.spec: row.kl_mean for row in found.evaluation.rows}
    assert set(kl) <= {"none", "recipe", planned.uniform, planned.recipe}
    assert found.row.kl_mean == min(x for spec, x in kl.items() if spec != "none") > 0
    assert found.bytes <= planned.budget
    CompressedCache(model, found.chosen)


def test_budgets_and_texts_that_are_too_small(model, ids):
    with pytest.raises(RecommendationError, match=r"give a larger --budget"):
        plan(model, ids, budget="1%")
    with pytest.raises(RecommendationError, match="191 tokens are too few"):
        plan(model, ids[:191])
    with pytest.raises(RecommendationError, match="context 0"):
        plan(model, ids, context=0)
    assert model.config._attn_implementation == "sdpa"


def test_bad_combinations_and_outliers_are_named():
    def one(spec, *key):
        return Measured(spec, 4.0, {}, dict(enumerate(key)), dict.fromkeys(range(len(key)), 1.0))

    four = [one("trellis:bits=4", 1.0, 1.0), one("kivi:bits=4", 1.0, 3.0)]
    bad = one("turboquant:bits=4", 1.0, 21.0)
    assert bad_notes([*four, bad, one("kivi:bits=2", 99.0, 99.0)]) == [
        "turboquant:bits=4 does badly on K of layers 1: up to 10 times the error of others of as "
        "many bits"
    ]
    assert bad_notes(four) == []
    k = torch.ones(1, 2, 10, 8)
    k[0, 1, :, 3] = 8.0
    (note,) = outlier_notes(type("Seen", (), {"layers": {5: SeenLayer(k, k, k / k, 1.0)}}))
    assert note.startswith("outlier channels in K") and note.endswith(": 5 (1, 64)")


def test_the_command_writes_a_recipe_that_loads(model_folder, model, tmp_path):
    out = good(
        "recommend", model_folder, "--quick", "--tokens", 300, "--context", 4096, "--budget", "25%",
        "--out", tmp_path / "out", "--threads", 1,
    )  # fmt: skip
    recipe = tmp_path / "out" / "recipe.json"
    data = json.loads((tmp_path / "out" / "recommend.json").read_text("utf-8"))
    for words in ("S of K", "trellis:bits=3", "2 of 2 layers are compressed", data["verdict"]):
        assert words in out
    assert "CompressedCache(model, " in out
    cache = CompressedCache(model, recipe)
    chosen = layer_specs(data["chosen"], 2)
    assert [layer.spec for layer in cache.layers] == chosen
    assert data["bytes"] <= data["budget"] == data["exact"]["bytes"] // 4
    assert len(data["measured"]) == 10 and data["measured"][0]["spec"] == "int:bits=8"
    with Image.open(tmp_path / "out" / "recommend.png") as image:
        assert image.width > 1500 and image.height > 900


def test_wrong_options_are_told_before_a_model_is_loaded(tmp_path):
    for option, value, words in (
        ("--budget", "much", "neither a share"),
        ("--context", 0, "--context 0"),
        ("--tokens", 10, "10 tokens give nothing"),
    ):
        result = invoke("recommend", tmp_path / "no-model", option, value)
        assert result.exit_code == 2 and words in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_gets_a_near_lossless_cache(tmp_path):
    good("recommend", "smollm2", "--quick", "--out", tmp_path)
    data = json.loads((tmp_path / "recommend.json").read_text("utf-8"))
    assert data["kl_mean"] <= 0.002
    assert data["verdict"] in ("lossless", "near-lossless")
    assert data["bytes"] <= 0.3 * data["exact"]["bytes"]
    assert all(parse_spec(x["spec"]) for x in data["measured"])
