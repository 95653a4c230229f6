"""`kvpact recipes` and recipes by name on the command line."""

from commands import bad, good

from kvpact.data import recipe_names, recipe_path


def test_the_list_has_every_recipe():
    out = good("recipes")
    for name in recipe_names():
        assert f"recipe:{name}" in out
    assert "trellis:bits=3" in out and "topics" in out


def test_one_is_printed_as_it_is_written():
    wanted = recipe_path("smollm2-3bit").read_text("utf-8")
    assert good("recipes", "smollm2-3bit") == good("recipes", "recipe:smollm2-3bit") == wanted


def test_unknown_names_are_told_before_a_model_is_loaded():
    unknown = "recipe:smol"
    for command in (("recipes", "smol"), ("eval", unknown), ("generate", "a", "--spec", unknown)):
        assert "recipe:smollm2-3bit" in bad(*command)
