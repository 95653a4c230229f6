"""`MethodContract`: what a method has to keep to; and the checks of its spec."""

import dataclasses
import json

import pytest

from kvpact.errors import SpecError
from kvpact.methods import Method
from kvpact.registry import find_method, register_method
from kvpact.spec import Spec, parse_spec
from kvpact.testing.depends import depends_on
from kvpact.testing.method_base import MethodKit
from kvpact.testing.method_codec import CodecChecks
from kvpact.testing.method_slots import SlotChecks


class SpecChecks(MethodKit):
    """The dataclass is the one source of text, JSON and equality."""

    @depends_on("bytes")
    def test_text_round_trip(self) -> None:
        """The canonical text reads back to the same spec, and prints as itself."""
        spec = self.parsed()
        again = parse_spec(str(spec))
        assert again == spec
        assert str(again) == str(spec)

    @depends_on("bytes")
    def test_json_round_trip(self) -> None:
        """JSON holds all options (but defaults of later ones), and reads back to the same spec."""
        spec = self.parsed()
        text = json.dumps(spec.to_json())
        assert Spec.from_json(text) == spec
        assert Spec.from_json(json.loads(text)) == spec
        for method, data in ((spec.key, "key"), (spec.value, "value")):
            names = {
                field.name
                for field in dataclasses.fields(method)
                if field.name not in getattr(method, "added", ())
                or getattr(method, field.name) != field.default
            }
            assert names <= set(spec.to_json()[data])

    def test_methods_are_frozen_and_hashable(self) -> None:
        """A method can be a key, and nobody can change it."""
        spec = self.parsed()
        assert len({spec, self.parsed()}) == 1
        for method in (spec.key, spec.value):
            assert isinstance(method, Method)
            assert hash(method) == hash(dataclasses.replace(method))
            with pytest.raises(dataclasses.FrozenInstanceError):
                method.window = 1  # type: ignore[misc]

    def test_wrong_options_are_refused(self) -> None:
        """Unknown and repeated options, wrong types and ranges are errors."""
        method = self.parsed().key
        for option in ("no_such_option=1", "window=1,window=1", "window=x", "window=-1", "window"):
            with pytest.raises(SpecError):
                parse_spec(f"{method.name}:{option}")
        data = self.parsed().to_json()
        for wrong in ({"window": "1"}, {"version": -1}, {"no_such_option": 1}, {"sinks": True}):
            with pytest.raises(SpecError):
                Spec.from_json({**data, "key": {**data["key"], **wrong}})

    def test_registered_under_its_name(self) -> None:
        """The registry gives the class back; the name can't be taken by another class."""
        method = type(self.parsed().key)
        assert find_method(method.name) is method
        other = type("Other", (method,), {"name": method.name})
        with pytest.raises(Exception, match="choose another"):
            register_method(other)
        assert find_method(method.name) is method

    def test_exact_tokens_are_options(self) -> None:
        """Sinks and window can be set for every method."""
        spec = self.parsed().with_options(sinks=1, window=2)
        assert [(side.sinks, side.window) for side in (spec.key, spec.value)] == [(1, 2)] * 2
        assert parse_spec(str(spec)) == spec


class MethodContract(SpecChecks, CodecChecks, SlotChecks):
    """Inherit this in a test module and set `spec`; pytest does the rest.

    Attributes
    ----------
    spec : str
        The spec to be tested, e.g. ``"mine:bits=4"``; a slash for unlike K and V is fine.
    max_relative_error : float
        Limit of `|decoded - x| / |x|` over normally distributed tokens; 1.0 (better than storing
        nothing) unless a subclass knows better.

    Notes
    -----
    A conforming method round-trips as text and JSON; declares every array that it stores; is
    deterministic, independent of other rows, heads and groups, and stores the same bytes however
    the tokens are cut into pieces; counts all its bytes; never reads unused slots; returns finite
    numbers or a named error; and codes on after a rollback has cut one of its groups.
    """
