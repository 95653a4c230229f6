"""`MethodContract`: the checks that every method passes, of its spec and its arithmetic."""

import dataclasses
import json

import pytest
import torch

from kvpact.errors import KVPactError, SpecError
from kvpact.formats import TILE, CodesField
from kvpact.methods import Method
from kvpact.registry import find_method, register_method
from kvpact.spec import Spec, parse_spec
from kvpact.testing.data import Shape, floats, integers, random_tokens
from kvpact.testing.depends import depends_on
from kvpact.testing.held import copied_tensors, difference, same_bytes
from kvpact.testing.method_base import MethodKit, both_sides, relative_error
from kvpact.testing.method_slots import SlotChecks

HARD = {
    "zeros": 0.0,
    "a constant": 3.0,
    "the largest fp16 numbers": 6e4,
    "beyond fp16": 1e9,
    "beyond the square root of fp32's range": 1e30,
    "near the end of fp32": 3e38,
    "tiny": 1e-30,
    "denormal": 1e-40,
}


class CodecChecks(MethodKit):
    """`encode` and `decode` on arrays."""

    @both_sides("bytes")
    def test_arrays_are_as_declared(self, side: str, shape: Shape) -> None:
        """Group, field names, shapes, dtypes and code ranges are those that the fields say."""
        codec, x = self.sample(side, shape)
        assert codec.group == 1 or codec.group % TILE == 0
        names = [field.name for field in codec.fields]
        assert len(set(names)) == len(names)
        before = x.clone()
        arrays = codec.encode(x)
        assert same_bytes(x, before), "encode changed its input"
        assert set(arrays) == set(names), "encode's names differ from the fields'"
        for field in codec.fields:
            array = arrays[field.name]
            units = x.shape[2] // codec.group if field.per_group else x.shape[2]
            assert array.shape[:3] == (*x.shape[:2], units), field.name
            if isinstance(field, CodesField):
                assert array.dtype == torch.uint8
                assert array.shape[3] == field.dim
                assert int(array.max()) < 1 << field.bits
            else:
                assert array.dtype == field.dtype, field.name
        decoded = codec.decode(arrays)
        assert decoded.dtype == torch.float32
        assert decoded.shape == x.shape

    @both_sides("bytes")
    def test_distortion(self, side: str, shape: Shape) -> None:
        """Normally distributed tokens come back with less than `max_relative_error`."""
        codec, x = self.sample(side, shape)
        y = codec.transform.inverse(codec.decode(codec.encode(x)))
        assert torch.isfinite(y).all()
        assert relative_error(x, y) < self.max_relative_error

    @both_sides("bytes")
    def test_rows_heads_and_groups_are_independent(self, side: str, shape: Shape) -> None:
        """A token's bytes depend on its own group alone; encoding twice gives the same bytes.

        What a codec has learnt may be of each head, so heads stay together.
        """
        codec, x = self.sample(side, shape)
        whole, again = codec.encode(x), self.sample(side, shape)[0].encode(x.clone())
        assert not difference(whole, again)
        last = x[-1:, :, -codec.group :].clone()
        if not codec.joint:
            last[:, :-1] = last[:, :-1].flip(-1) * 3 + 1  # other heads' tokens don't matter
        found = codec.encode(last)
        for field in codec.fields:
            count = 1 if field.per_group else codec.group
            wanted = whole[field.name][-1:, -1:, -count:]
            assert same_bytes(wanted, found[field.name][:, -1:]), field.name

    @both_sides("bytes")
    def test_nothing_stays_in_the_codec(self, side: str) -> None:
        """A codec has no memory: what isn't in a field would be in no count of bytes."""
        codec = self.codec(side, 64, heads=2)
        first = random_tokens(1, 2, max(codec.group, 64), 64)
        codec.decode(codec.encode(first))
        before = copied_tensors(codec)
        x = random_tokens(2, 2, 2 * max(codec.group, 64), 64, seed=1)
        codec.decode(codec.encode(x))
        assert not difference(before, copied_tensors(codec))

    @both_sides("bytes")
    def test_transform_is_orthogonal(self, side: str) -> None:
        """Inner products survive the transform, and `inverse` undoes it."""
        for dim in (1, 64, 80, 96, 576):
            transform = self.codec(side, dim).transform
            x, y = random_tokens(1, 1, 3, dim), random_tokens(1, 1, 3, dim, seed=1)
            torch.testing.assert_close(
                transform.inverse(transform.forward(x)), x, atol=1e-5, rtol=0
            )
            products = transform.forward(x) @ transform.forward(y).mT
            torch.testing.assert_close(products, x @ y.mT, atol=1e-3, rtol=1e-4)

    @both_sides("bytes")
    @pytest.mark.parametrize("varied", [False, True], ids=["constant", "varied"])
    def test_hard_input_is_finite_or_refused(self, side: str, varied: bool) -> None:
        """Whatever is finite comes back finite, or is refused with a named error."""
        codec = self.codec(side, 80)
        for name, magnitude in HARD.items():
            x = floats(magnitude).expand(1, 1, 2 * codec.group, 80).clone()
            if varied:
                signs = (-1) ** integers(*range(x.shape[2])).view(-1, 1)
                x = x * (1 - floats(*range(80)) / 64) * signs
            try:
                arrays = codec.encode(x)
            except KVPactError:
                assert magnitude > 1e4, f"{name}: ordinary input was refused"
                continue
            assert all(torch.isfinite(array.float()).all() for array in arrays.values()), name
            y = codec.transform.inverse(codec.decode(arrays))
            assert torch.isfinite(y).all(), name
            if magnitude <= 6e4:
                # fp16 side information has a resolution: tiny input may become zero, but not large.
                limit = 1.01 * max(x.abs().max().item() * 80**0.5, 1e-5)
                assert y.abs().max() <= limit, name


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
