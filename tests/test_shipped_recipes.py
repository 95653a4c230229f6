"""The recipes in the package: they load by name, and their tables say what caches of them hold."""

import pytest
import torch

import kvpact
from kvpact.cache import planned_bytes
from kvpact.data import recipe_names
from kvpact.errors import SpecError
from kvpact.recipe import is_recipe, layer_specs, load_recipe, sensitivities

LAYERS = {"smollm2": 30, "gemma3": 18}
CONTEXT = 32_768
LADDERS = [name for name in recipe_names() if name.endswith("-budget")]
SPECS = [name for name in recipe_names() if name not in LADDERS]


def test_which_there_are():
    wanted = {"smollm2": ("2.5bit", "3bit", "4bit"), "gemma3": ("3bit", "4bit")}
    specs = {f"{model}-{size}" for model in wanted for size in wanted[model]}
    assert set(SPECS) == specs and set(LADDERS) == {f"{model}-budget" for model in wanted}


@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_has_a_number_for_each_layer(name):
    model = name.removesuffix("-budget")
    recipe, layers = load_recipe(f"recipe:{name}"), LAYERS[model]
    assert recipe["default"] == "none" and recipe["num_layers"] == layers
    assert recipe["measured"]["model"] == model and recipe["measured"]["text"] == "novel"
    found = sensitivities(f"recipe:{name}", layers)
    compressed = {layer for layer, _ in found if found[layer, 0] or found[layer, 1]}
    assert len(found) == 2 * layers and len(compressed) == {"smollm2": 30, "gemma3": 3}[model]
    assert sum(found.values()) == pytest.approx(2 * len(compressed), rel=0.01)


def test_what_costs_least_goes_first():
    geometry = kvpact.CacheGeometry(30, 3, 64, dtype=torch.bfloat16)
    cache = kvpact.create_cache("recipe:smollm2-budget", geometry, budget="24MiB")
    assert cache.budget.sensitivity == sensitivities("recipe:smollm2-budget", 30)
    schedule = cache.budget.schedule(geometry, 1, torch.bfloat16)
    cost, specs = cache.budget.sensitivity, [schedule.spec(i, 5000) for i in range(30)]
    for side, methods in enumerate(([x.key for x in specs], [x.value for x in specs])):
        low = [cost[i, side] for i, x in enumerate(methods) if x.bits == 2]
        high = [cost[i, side] for i, x in enumerate(methods) if x.bits == 4]
        assert low and (not high or max(low) < min(high))
    even = kvpact.create_cache("none", geometry, budget="24MiB").budget
    assert even.sensitivity is None
    assert even.schedule(geometry, 1, torch.bfloat16).layers != schedule.layers


@pytest.mark.parametrize("name", SPECS)
def test_each_loads_by_name_and_tells_what_was_measured(name):
    model = name.partition("-")[0]
    recipe = load_recipe(f"recipe:{name}")
    specs = layer_specs(f" recipe:{name} ", LAYERS[model])
    assert len(specs) == recipe["num_layers"] == LAYERS[model]
    assert {int(layer) for layer in recipe["layers"]} <= set(range(LAYERS[model]))
    measured = recipe["measured"]
    assert measured["model"] == model and measured["context"] == CONTEXT
    rows = measured["rows"]
    assert [row["text"] for row in rows] == ["novel", "novel", "topics", "topics"]
    for own, other in zip(rows[::2], rows[1::2], strict=True):
        assert own["spec"] == "recipe" and kvpact.parse_spec(other["spec"])
        assert 0 < own["kl"] < other["kl"] and own["percent"] >= other["percent"]
    with pytest.raises(SpecError, match=rf"recipe 'recipe:{name}' is for a model of .* has 7"):
        layer_specs(f"recipe:{name}", 7)


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("smollm2")])
def test_the_share_is_that_of_the_cache(name):
    specs = layer_specs(f"recipe:{name}", 30)
    geometry = kvpact.CacheGeometry(1, 3, 64)
    both = (specs, [kvpact.parse_spec("none")] * 30)
    held, exact = (sum(planned_bytes(x, geometry, CONTEXT)["total"] for x in y) for y in both)

    row = load_recipe(f"recipe:{name}")["measured"]["rows"][0]
    assert row["percent"] == pytest.approx(100 * held / exact, abs=0.06)


def test_caches_take_their_names():
    geometry = kvpact.CacheGeometry(30, 3, 64, dtype=torch.float16)
    cache = kvpact.create_cache("recipe:smollm2-3bit", geometry)
    assert list(cache.specs) == layer_specs("recipe:smollm2-3bit", 30)
    assert len(set(cache.specs)) > 3
    with pytest.raises(SpecError, match="for a model of 30 layers, and this one has 29"):
        kvpact.create_cache("recipe:smollm2-3bit", kvpact.CacheGeometry(29, 3, 64))


@pytest.mark.parametrize("name", ["smollm2", "../README", "smollm2-3bit.toml", ""])
def test_unknown_names_list_the_others(name):
    assert is_recipe(f"recipe:{name}")
    with pytest.raises(SpecError, match=r"kvpact ships .*recipe:smollm2-3bit, "):
        layer_specs(f"recipe:{name}", 30)


def test_where_one_spec_is_wanted_a_recipe_is_named():
    with pytest.raises(SpecError, match="is a recipe, a spec for each layer; here one spec"):
        kvpact.parse_spec("recipe:smollm2-3bit")
