"""`kvpact recommend` from a model to a recipe that loads."""

import json
import math
from dataclasses import replace

import pytest
import torch
from commands import bad, good, invoke
from PIL import Image
from transformers import AutoModelForCausalLM

import kvpact
from kvpact.cache import planned_bytes
from kvpact.cli import inputs
from kvpact.evaluate import EvaluationError, Question, TaskCase, TaskResult, TaskScore, evaluate
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.attention.seen import Seen, SeenLayer
from kvpact.recipe import layer_specs, load_recipe, sensitivities
from kvpact.recommend import Measured, RecommendationError, plan, run, survey, verify
from kvpact.recommend.base import predicted
from kvpact.recommend.measure import Costs, Survey, measured_of
from kvpact.recommend.run import outlier_notes
from kvpact.spec import parse_spec


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 128, (300,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def surveyed(model, ids):
    return survey(model, ids, chunk=128)


@pytest.fixture(scope="module")
def planned(surveyed):
    # Between 3 and 4 bits in all layers.
    return plan(surveyed, context=4096, budget="25%")


def test_a_plan_ranks_specs_and_keeps_to_its_budget(planned):
    kl = {x.spec: x.predicted for x in planned.measured}
    assert list(kl.values()) == sorted(kl.values())
    assert kl["int:bits=8"] < kl["trellis:bits=4"] < kl["trellis:bits=3"] < kl["trellis:bits=2"]
    assert kl["kivi:bits=4"] < kl["kivi:bits=2"]
    exact = 2 * 2 * 2 * (32 + 32) * 4096  # layers, heads, bytes, widths
    assert planned.sizes.exact == exact and planned.budget == exact // 4
    geometry = CacheGeometry(1, 2, 32, dtype=torch.float16)
    specs = layer_specs(planned.recipe, 2)
    held = sum(planned_bytes(spec, geometry, 4096)["total"] for spec in specs)
    assert planned.recipe_bytes == held <= planned.budget
    assert planned.bytes_of(planned.uniform) <= planned.budget
    assert set(planned.choice) == {(i, side) for i in range(2) for side in ("key", "value")}
    kivi = planned.of("kivi:bits=4")
    assert kivi.slot_bits == 5.0
    assert kivi.bytes == 2 * planned_bytes(parse_spec("kivi:bits=4"), geometry, 4096)["total"]


def test_predictions_are_what_is_measured(model, ids, surveyed):
    # Random weights lose so much that their KL is not quadratic below 5 bits, and what degraded
    # states leave in later K and V is not covered: real models are held to 25 % (slow tests).
    planned = plan(surveyed, context=4096, budget="trellis:bits=5")
    specs = ["trellis:bits=5", "trellis:bits=6", "int:bits=8"]
    result = evaluate(model, ids, [*specs, planned.recipe], chunk=128)
    kl = {row.spec: row.kl_mean for row in result.rows}
    for spec in specs:
        assert planned.of(spec).predicted == pytest.approx(kl[spec], rel=0.4)
    assert planned.recipe_predicted == pytest.approx(kl["recipe"], rel=0.4)
    assert planned.recipe_bytes <= planned.bytes_of("trellis:bits=5") == planned.budget


def test_more_budget_never_costs_more(surveyed):
    plans = [plan(surveyed, context=4096, budget=budget) for budget in ("20%", "35%", "100%")]
    costs = []
    for found in plans:
        assert found.recipe_bytes <= found.budget
        chosen = [(key, spec) for key, spec in found.choice.items() if spec != "none"]
        costs.append(sum(getattr(found.of(x), side)[layer] for (layer, side), x in chosen))
    assert costs[0] > costs[1] > costs[2] == 0
    assert plans[2].recipe == "none" and plans[2].recipe_predicted == 0


def test_keys_and_values_may_have_unlike_specs(planned):
    choice = {(i, side): "none" for i in range(3) for side in ("key", "value")}
    choice[1, "key"] = "int:bits=8"
    found = replace(planned, choice=choice)
    assert found.layers == {0: "none", 1: "int:bits=8/none", 2: "none"}
    assert found.recipe == {"default": "none", "layers": {"1": "int:bits=8/none"}}


def test_what_shrinks_in_all_layers_is_squared_once():
    layers = {0: 0.1, 1: 0.3}
    one = Measured("a", 4.0, {}, {}, {0: 1.0, 1: 2.0}, {0: 0.5, 1: 0.0}, layers)
    assert one.value == pytest.approx({0: 0.5 + 0.1 * 0.4, 1: 0.3 * 0.4})
    assert one.predicted == pytest.approx(3.5 + 0.4**2)
    choice = {(0, "key"): "a", (0, "value"): "none", (1, "key"): "none", (1, "value"): "a"}
    assert predicted({"a": one}, choice) == pytest.approx(1.0 + 0.0 + 0.3**2)


def test_a_ladder_shares_one_sensitivity_a_layer():
    expected = {"trellis:bits=3": (4.0, 1.0), "trellis:bits=4": (1.0, 0.25), "kivi:bits=4": (1, 1)}
    ones, x = {i: torch.ones(2, 1) for i in range(2)}, torch.ones(1, 2, 10, 32)
    keys = {
        s: {i: torch.tensor([[1.0], [x]]) for i, x in enumerate(y)} for s, y in expected.items()
    }
    costs = {spec: Costs(key, ones, {}) for spec, key in keys.items()}
    seen = Seen(layers=dict.fromkeys(range(2), SeenLayer(x, x, x)), num_layers=2)
    # At 3 bits both layers cost 1 where 4 and 1 are expected; at 4 bits 1 where 1 and 0.25 are.
    found = Survey(seen, costs, 1, (), (), 300)
    three, four, other = measured_of(found, 1024, [0])
    assert three.key == pytest.approx({0: 1.0, 1: 1.0}) and four.key == pytest.approx(three.key)
    costs["trellis:bits=4"].key[0][0] = 3.0
    three, four, other = measured_of(found, 1024, [0])
    assert sum(three.key.values()) == pytest.approx(2.0)
    assert sum(four.key.values()) == pytest.approx(4.0)
    assert three.key[0] / three.key[1] == pytest.approx(four.key[0] / four.key[1])
    assert three.key[0] > three.key[1] and other.key == {0: 1.0, 1: 1.0}
    plain = measured_of(found, 1024, [0], smooth=False)
    assert plain[1].key == {0: 3.0, 1: 1.0}


def test_the_better_one_is_chosen(model, ids, planned):
    found = verify(model, ids, planned, chunk=128)
    kl = {row.spec: row.kl_mean for row in found.evaluation.rows}
    assert set(kl) == {"recipe", planned.uniform}
    assert found.row.kl_mean == min(kl.values()) > 0
    assert found.bytes <= planned.budget
    pair = found.against_uniform
    assert pair.against == planned.uniform
    assert pair.kl_difference == pytest.approx(kl["recipe"] - kl[planned.uniform])
    CompressedCache(model, found.chosen)
    # Each of the two that were measured calibrates the other, and both the rest.
    levels = {x: kl[x] / found.predicted_of(x) for x in ("recipe", planned.uniform)}
    eight = "int:bits=8"
    recipe = planned.recipe_predicted * levels[planned.uniform]
    assert found.calibrated("recipe") == pytest.approx(recipe)
    mean = math.sqrt(math.prod(levels.values()))
    assert found.calibrated(eight) == pytest.approx(planned.of(eight).predicted * mean)


def test_budgets_and_texts_that_are_too_small(model, ids, surveyed):
    with pytest.raises(RecommendationError, match=r"give a larger --budget"):
        plan(surveyed, budget="1%")
    with pytest.raises(RecommendationError, match="context 0"):
        plan(surveyed, context=0)
    with pytest.raises(EvaluationError, match="at least 258 tokens"):
        survey(model, ids[:257])
    assert model.config._attn_implementation == "sdpa"


def test_outliers_are_named():
    k = torch.ones(1, 2, 10, 8)
    k[0, 1, :, 3] = 8.0
    (note,) = outlier_notes(Seen(layers={5: SeenLayer(k, k, k / k)}))
    assert note.startswith("outlier channels in K") and note.endswith(": 5 (1, 64)")


def test_a_call_answers_prints_and_plots(model_folder, tmp_path):
    told = []
    found = kvpact.recommend(
        model_folder, tokens=300, chunk=128, budget=0.25, context=4096,
        progress=lambda done, total, what: told.append(done / total),
    )  # fmt: skip
    answer, line, _, head, *rows = repr(found).splitlines()
    assert found.verdict == "no verdict" and "tool" not in answer
    assert answer.startswith(f"{found.verdict}: KL ") and " of 2.10 MB at 4,096 tokens" in answer
    assert line == f"CompressedCache(model, {found.chosen!r})"
    path = tmp_path / "a.toml"
    assert found.line(path) == f"CompressedCache(model, {str(path)!r})"
    assert head.split()[:3] == ["spec", "slot", "bits"] and rows[0].startswith("int:bits=8 ")
    grown = {(row.spec, row.tokens): row.total for row in found.growth.rows}
    assert grown["recipe", 4096] == found.bytes and grown["none", 4096] == found.plan.sizes.exact
    assert grown["recipe", 1024] < grown["recipe", 4096] / 3
    assert told == sorted(told) and told[-1] == pytest.approx(1) and len(told) > 40
    for name in ("a.png", "a.svg"):
        found.plot(tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text("utf-8")
    assert drawn.count("<!-- trellis:bits=2 -->") == 2 and "<!-- predicted KL, nats" in drawn


def test_a_verdict_includes_the_arguments_of_tool_calls(model_folder, monkeypatch):
    asked = tuple(Question(0.5, " what?", x) for x in (" 12", " 34"))
    case = TaskCase("tools", 0, "abcdefgh" * 20, asked)
    monkeypatch.setattr(run, "_tool_cases", lambda *args: [case])
    told = []
    found = kvpact.recommend(
        model_folder, tokens=300, chunk=128, budget=0.9, context=4096,
        progress=lambda done, total, what: told.append(done / total),
    )  # fmt: skip
    assert found.tools.scores[0].task == "tools" and found.kept.questions == 2
    assert found.tools.scores[0].spec == found.row.spec
    assert told == sorted(told) and told[-1] == pytest.approx(1)
    assert "tool" not in found.answer
    verdicts = []
    for lost in (0, 3, 5):
        numbers = ("a", False, "tools", 0, 0.5, -1.0, -1.0)
        scores = [TaskScore(*numbers, i >= lost, True) for i in range(60)]
        row = replace(found.row, kl_mean=0.0004)
        tools = TaskResult(scores, 900, 0)
        protocol = replace(found.evaluation.protocol, scored=1000)
        evaluation = replace(found.evaluation, rows=[row], protocol=protocol)
        verdicts.append(replace(found, evaluation=evaluation, tools=tools).verdict)
    assert verdicts == ["very close", "very close", "visible"]
    found = replace(found, evaluation=evaluation, tools=tools)
    assert "fewer ids and numbers into tool calls" in found.answer
    broken = replace(evaluation, rows=[replace(found.row, kl_mean=1.0)])
    assert replace(found, evaluation=broken, tools=tools).verdict == "broken"


def test_the_command_writes_a_recipe_that_loads(model_folder, model, tmp_path):
    out = good(
        "recommend", model_folder, "--quick", "--tokens", 300, "--context", 4096, "--budget", "25%",
        "--out", tmp_path / "out", "--threads", 1, "--verbose",
    )  # fmt: skip
    recipe = tmp_path / "out" / "recipe.toml"
    data = json.loads((tmp_path / "out" / "recommend.json").read_text("utf-8"))
    for words in ("predicted", "trellis:bits=3", "2 of 2 layers are compressed", data["verdict"]):
        assert words in out
    answer, line = out.splitlines()[:2]  # first
    assert answer.startswith(data["verdict"]) and line.startswith("CompressedCache(model, ")
    cache = CompressedCache(model, recipe)
    chosen = layer_specs(data["chosen"], 2)
    assert [layer.spec for layer in cache.layers] == chosen
    told = load_recipe(recipe)
    assert told["num_layers"] == 2 and told["measured"]["context"] == 4096
    rows = {row["spec"]: row for row in told["measured"]["rows"]}
    for row in data["verified"]:
        if row["spec"] != "none":
            assert rows[row["spec"]]["kl"] == pytest.approx(row["kl_mean"], rel=5e-3)
    assert min(row["kl"] for row in rows.values()) == pytest.approx(data["kl_mean"], rel=5e-3)
    assert out.splitlines()[2].startswith("written: ") and "ladder.toml" in out
    found = sensitivities(tmp_path / "out" / "ladder.toml", 2)
    costs = next(x for x in data["measured"] if x["spec"] == "trellis:bits=2")
    told = {(int(i), 0): x for i, x in costs["key"].items()}
    shrunk = costs["shrunk"]
    told |= {(int(i), 1): x + shrunk[i] * sum(shrunk.values()) for i, x in costs["noise"].items()}
    mean = sum(told.values()) / 4
    assert found == pytest.approx({part: x / mean for part, x in told.items()}, rel=0.01)
    CompressedCache(model, tmp_path / "out" / "ladder.toml", budget="1MB")
    assert data["bytes"] <= data["budget"] == data["exact"]["bytes"] // 4
    assert len(data["measured"]) == 12 and data["measured"][0]["spec"] == "int:bits=8"
    with Image.open(tmp_path / "out" / "recommend.png") as image:
        assert image.width > 1500 and image.height > 900


@pytest.mark.parametrize("budget", ["25", "1%", "9%"])
def test_a_budget_below_the_smallest_is_told_before_a_model_is_loaded(budget, monkeypatch):
    monkeypatch.setattr(inputs, "open_model", lambda *args: pytest.fail("loaded"))
    told = bad("recommend", "smollm2", "--budget", budget)
    assert (
        f"budget {budget} is too small at 32,768 tokens" in told and "105.65 MB, 14.0% of" in told
    )


def test_wrong_options_are_told_before_a_model_is_loaded(tmp_path):
    for option, value, words in (
        ("--budget", "much", "neither a share"), ("--budget", "trelis:bits=3", "nor a spec"),
        ("--context", 0, "'--context'"), ("--tokens", 10, "10 tokens give nothing"),
    ):  # fmt: skip
        result = invoke("recommend", tmp_path / "no-model", option, value)
        assert result.exit_code == 2 and words in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_gets_a_close_cache(tmp_path):
    good("recommend", "smollm2", "--quick", "--out", tmp_path)
    data = json.loads((tmp_path / "recommend.json").read_text("utf-8"))
    assert data["kl_mean"] <= 0.002 and data["verdict"] in ("very close", "close")
    assert data["bytes"] <= 0.3 * data["exact"]["bytes"]
    assert all(parse_spec(x["spec"]) for x in data["measured"])
