"""Methods by name: registration, duplicates, entry points that fail."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

import kvpact
from kvpact import registry
from kvpact.errors import RegistrationError
from kvpact.methods.none import Exact
from kvpact.registry import Foreign, find_method, known_names


def make_method(method_name: str = "sample_method"):
    @dataclass(frozen=True, kw_only=True)
    class Sample(Exact):
        name: ClassVar[str] = method_name

    return Sample


@pytest.fixture
def sample():
    method = kvpact.register_method(make_method())
    yield method
    registry._registered.pop("sample_method")


def test_a_registered_method_is_found_listed_and_parsed(sample):
    assert find_method("sample_method") is sample
    assert kvpact.list_methods()["sample_method"] is sample
    assert str(kvpact.parse_spec("sample_method:dtype=fp16")) == "sample_method:dtype=fp16"
    cache = kvpact.create_cache("sample_method/fp8", kvpact.CacheGeometry(1, 1, 8))
    assert isinstance(cache.specs[0].key, sample)


def test_registering_the_same_class_again_changes_nothing(sample):
    assert kvpact.register_method(sample) is sample


def test_a_taken_name_is_refused(sample):
    with pytest.raises(RegistrationError, match="'sample_method' is there already"):
        kvpact.register_method(make_method())
    assert find_method("sample_method") is sample


@pytest.mark.parametrize("name", ["turboquant", "none", "q8_0", "turboquant_k8v4"])
def test_names_of_the_packages_methods_aliases_and_refused_names_are_taken(name):
    before = find_method(name)
    with pytest.raises(RegistrationError, match="is there already"):
        kvpact.register_method(make_method(name))
    assert find_method(name) is before


class NoDataclass:
    name = "no_dataclass"
    version = 1
    key_codec = value_codec = None


@pytest.mark.parametrize("thing", [int, "text", None, NoDataclass, NoDataclass(), Exact()])
def test_what_is_no_method_class_is_refused(thing):
    with pytest.raises(RegistrationError):
        kvpact.register_method(thing)
    assert "no_dataclass" not in known_names()


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "a,b", "a=b", "a b", ":", 5])
def test_names_that_no_spec_could_hold_are_refused(name):
    before = known_names()
    with pytest.raises(RegistrationError):
        kvpact.register_method(make_method(name))
    assert known_names() == before


def test_foreign_names_are_known_but_not_listed():
    foreign = [name for name in known_names() if isinstance(find_method(name), Foreign)]
    assert len(foreign) == 4
    assert not set(foreign) & set(kvpact.list_methods())
    for name in foreign:
        kvpact.parse_spec(find_method(name).nearest)  # can be copied from the message


@pytest.mark.parametrize(("target", "message"), [
    ("no_such_module_anywhere:Thing", "can't be loaded"),
    ("kvpact.methods.none:NoSuchName", "can't be loaded"),
    ("kvpact.methods.none:ExactCodec", "lacks"),
    ("kvpact.methods.none:Exact", "calls itself 'none'"),
])  # fmt: skip
def test_a_broken_entry_point_is_named_when_it_is_used(monkeypatch, target, message):
    point = EntryPoint("broken", target, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"broken": [point]})
    assert "broken" in known_names()  # nothing is imported for a list of names
    with pytest.raises(RegistrationError, match=message):
        kvpact.parse_spec("broken")


def test_what_is_installed_is_looked_through_once(monkeypatch):
    looks, real = [], registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda **given: looks.append(1) or real(**given))
    registry._entry_points.cache_clear()
    kvpact.list_methods()
    assert len(looks) == 1
