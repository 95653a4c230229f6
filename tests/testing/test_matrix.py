"""The matrix of specs: each combination of facts goes through all of the kit; no check is lost."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from matrix import CONTRACTS, NOT_OF_PAGES, class_specs, facts, kit_classes, page_specs

import kvpact
from kvpact import registry
from kvpact.methods.turboquant import TurboQuant
from kvpact.testing import example_specs, method_specs
from kvpact.testing.cache_base import CacheKit

KINDS = ("Method", "Cache", "Paged")


def checks(kind):
    return {name for name in dir(kind) if name.startswith("test_") and getattr(kind, name)}


def classes(kind, fitted):
    return [made for _, made in kit_classes(__name__, kind, fitted=fitted)]


@pytest.mark.parametrize("fitted", [False, True], ids=["plain", "fitted"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_is_made_and_every_spec_stores(kind, fitted):
    made = classes(kind, fitted)
    lost = checks(CONTRACTS[fitted][kind]) - set().union(*map(checks, made))
    assert lost <= ({"test_bias_is_a_part_of_the_whole"} if fitted else set())
    assert {one.spec for one in made} >= set(example_specs(fitted=fitted))
    stores = {
        "Method": "test_storage_gives_back_what_was_written",
        "Cache": "test_pieces_are_the_whole",
        "Paged": "test_slots_are_those_of_the_contiguous_cache",
    }
    assert all(stores[kind] in checks(one) for one in made)


def test_each_combination_of_facts_is_in_a_cache_of_which_all_is_checked():
    made = [one for fitted in (False, True) for one in classes("Cache", fitted)]
    whole = [one.spec for one in made if "test_wrong_tensors" in checks(one)]
    assert len({facts(spec) for spec in whole}) == len(whole)
    assert {facts(spec) for spec in whole} == {facts(spec) for spec in example_specs()}
    assert len(whole) < len(made) / 2, "a spec of each class, and not every spec"


def test_unlike_sides_windows_and_none_are_among_them():
    whole = [kvpact.parse_spec(spec) for spec in class_specs(example_specs())]
    assert any(spec.key.window != spec.value.window for spec in whole)
    assert any(spec.key.window == spec.value.window == 0 for spec in whole)
    assert any(spec.key.name != spec.value.name for spec in whole)


def test_pages_have_every_fact_once():
    for fitted, count in ((False, 4), (True, 2)):
        specs = page_specs(example_specs(fitted=fitted))
        assert len(specs) == count
        there, occurring = (
            {name for spec in some for name, holds in facts(spec)._asdict().items() if holds}
            for some in (specs, example_specs(fitted=fitted))
        )
        assert occurring - there <= NOT_OF_PAGES


def test_every_method_goes_through_all_of_its_kit():
    whole = {one.spec for one in classes("Method", False) if "shapes" not in vars(one)}
    whole |= {one.spec for one in classes("Method", True) if "shapes" not in vars(one)}
    assert whole >= set(method_specs())


def test_a_new_method_is_in_its_class_by_being_registered():
    @dataclass(frozen=True, kw_only=True)
    class Mine(TurboQuant):
        """Bias, groups and heads that are coded together: what no other example has."""

        name: ClassVar[str] = "mine"
        examples: ClassVar[dict] = {"mine:bits=3,mode=prod,center=64": 0.3}
        variants: ClassVar[dict] = {}

        def key_codec(self, dim, dtype):
            codec = super().key_codec(dim, dtype)
            codec.joint = True
            return codec

    before = class_specs(example_specs())
    kvpact.register_method(Mine)
    try:
        (new,) = set(class_specs(example_specs())) - set(before)
        assert new == next(iter(Mine.examples))
        (made,) = (one for one in classes("Cache", facts(new).fitted) if one.spec == new)
        assert checks(made) >= checks(CacheKit) | {"test_wrong_tensors"}
    finally:
        registry._registered.pop("mine")
        facts.cache_clear()
