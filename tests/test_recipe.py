"""Recipes: a default spec and others for named layers."""

import json

import pytest
import torch

import kvpact
from kvpact.errors import SpecError
from kvpact.recipe import layer_specs

RECIPE = {
    "default": "turboquant:bits=3,center=64",
    "layers": {"0": "int:bits=8", "1": "fp8/int:bits=4", "-1": "q8_0"},
}
WANTED = [
    "int:bits=8", "fp8/int:bits=4", "turboquant:bits=3,center=64", "turboquant:bits=3,center=64",
    "int:bits=8,sinks=0,window=0",
]  # fmt: skip
TOML = """
default = "turboquant:bits=3,center=64"
[layers]
0 = "int:bits=8"
1 = "fp8/int:bits=4"
-1 = "q8_0"
"""


def texts(source, layers: int = 5) -> list[str]:
    return [str(spec) for spec in layer_specs(source, layers)]


@pytest.mark.parametrize("source", ["mapping", "toml", "json", "integer keys", "text path"])
def test_every_form_gives_the_same_layers(source, tmp_path):
    recipe = RECIPE
    if source in ("toml", "text path"):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(TOML, "utf-8")
    if source == "json":
        recipe = tmp_path / "recipe.json"
        recipe.write_text(json.dumps(RECIPE), "utf-8")
    if source == "integer keys":
        recipe = RECIPE | {"layers": {int(k): v for k, v in RECIPE["layers"].items()}}
    if source == "text path":
        recipe = str(recipe)
    assert texts(recipe) == WANTED


def test_a_spec_is_a_recipe_of_one_line():
    assert texts("fp8", 3) == ["fp8"] * 3
    assert texts(kvpact.parse_spec("fp8"), 3) == ["fp8"] * 3
    assert texts({"default": "fp8"}, 2) == ["fp8", "fp8"]
    assert texts({"default": kvpact.parse_spec("fp8"), "layers": {}}, 1) == ["fp8"]


def test_create_cache_follows_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(TOML, "utf-8")
    geometry = kvpact.CacheGeometry(5, 1, 64)
    cache = kvpact.create_cache(path, geometry)
    assert [str(spec) for spec in cache.specs] == WANTED
    x = torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(0))
    bits = {}
    for layer in range(5):
        alone = kvpact.create_cache(cache.specs[layer], kvpact.CacheGeometry(1, 1, 64))
        alone.prefill(0, x, x)
        cache.prefill(layer, x, x)
        bits[layer] = alone.memory_usage()
        later, other = (c.prefill(i, x, x) for c, i in ((cache, layer), (alone, 0)))
        assert torch.equal(later.k, other.k) and torch.equal(later.v, other.v)
        cache.truncate(128)
    assert bits[2] == bits[3] < bits[1] < bits[0]
    assert cache.stats()["spec"] == "mixed"


BAD = {
    "unknown key": ({"default": "none", "layer": {}}, "a recipe has 'default'"),
    "no default": ({"layers": {}}, "a recipe has 'default'"),
    "layers no table": ({"default": "none", "layers": ["fp8"]}, "a recipe has 'default'"),
    "layer beyond": ({"default": "none", "layers": {"5": "fp8"}}, "layer 5 is not among 5"),
    "layer before": ({"default": "none", "layers": {"-6": "fp8"}}, "layer -6 is not among 5"),
    "no number": ({"default": "none", "layers": {"first": "fp8"}}, "should be a whole number"),
    "half a layer": ({"default": "none", "layers": {1.5: "fp8"}}, "should be a whole number"),
    "a truth value": ({"default": "none", "layers": {True: "fp8"}}, "should be a whole number"),
    "twice": ({"default": "none", "layers": {"4": "fp8", "-1": "int"}}, "layer -1 stands twice"),
    "bad default": ({"default": "nun"}, "unknown method 'nun'"),
    "bad spec": ({"default": "none", "layers": {"0": "int:bit=4"}}, "no option 'bit'"),
    "other layers": ({"default": "none", "num_layers": 4}, "of 4 layers, and this one has 5"),
    "no measured table": ({"default": "none", "measured": 3}, "a recipe has 'default'"),
    "no text": ({"default": "none", "layers": {"0": 8}}, "a spec is text"),
}


@pytest.mark.parametrize("ladder", [
    {"key": [1.0] * 5},
    {"key": [1.0] * 5, "value": [1.0] * 4},
    {"key": [1.0] * 5, "value": [1.0, 1.0, 1.0, 1.0, -1.0]},
    {"key": [1.0] * 5, "value": [True] * 5},
    {"key": [1.0] * 5, "value": [float("nan")] * 5},
    {"key": [1.0] * 5, "value": "11111"},
    {"key": [1.0] * 5, "value": [1.0] * 5, "query": [1.0] * 5},
])  # fmt: skip
def test_a_ladder_has_two_numbers_for_each_layer(ladder):
    geometry = kvpact.CacheGeometry(5, 1, 64)
    with pytest.raises(SpecError, match="'key' and 'value', 5 numbers each"):
        kvpact.create_cache({"default": "none", "ladder": ladder}, geometry, budget="1MB")


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_bad_recipes_are_refused(source, message):
    with pytest.raises(SpecError) as caught:
        kvpact.create_cache(source, kvpact.CacheGeometry(5, 1, 64))
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [
    ("recipe.toml", "default = "),
    ("recipe.toml", 'default = "none"\ndefault = "fp8"'),
    ("recipe.json", "{"),
    ("recipe.json", "[" * 100_000),
    ("recipe.json", '{"default": "none", "layers": {"0": "fp8", "0": "int"}}'),
])  # fmt: skip
def test_files_that_cant_be_read_are_refused(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text, "utf-8")
    with pytest.raises(SpecError, match="can't be read"):
        layer_specs(path, 5)


def test_files_that_hold_something_else_or_are_not_there(tmp_path):
    path = tmp_path / "recipe.json"
    with pytest.raises(SpecError, match="can't be read"):
        layer_specs(path, 5)
    path.write_text('["none"]', "utf-8")
    with pytest.raises(SpecError, match="should be a table"):
        layer_specs(path, 5)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="can't be read"):
        layer_specs(path, 5)
