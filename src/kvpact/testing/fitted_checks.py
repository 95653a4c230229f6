"""Checks of what is learnt: when, from what, where it is held, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvpact.errors import FormatError, GeometryError, KVPactError, NonFiniteError, SpecError
from kvpact.formats import TILE
from kvpact.testing.data import Shape, floats, random_tokens
from kvpact.testing.depends import depends_on
from kvpact.testing.fitted_base import FittedKit
from kvpact.testing.held import copied_tensors, difference, held_bytes
from kvpact.testing.method_base import both_sides
from kvpact.testing.method_codec import HARD


class FitChecks(FittedKit):
    """`fit`, `state` and `restore`."""

    @both_sides
    def test_an_unfitted_codec_says_so(self, side: str) -> None:
        """It has no state, and decodes nothing."""
        codec = self.unfitted(side, 64)
        assert not codec.fitted
        assert codec.state() == {}
        with pytest.raises(SpecError, match="fit"):
            codec.require_fitted()
        with pytest.raises(SpecError, match="fit"):
            codec.decode(self.fitted(side, 64).encode(random_tokens(1, 1, TILE, 64)))
        fitted = self.fitted(side, 64)
        assert fitted.fitted
        fitted.require_fitted()

    @depends_on("bytes")
    @both_sides
    def test_fit_returns_another_codec(self, side: str, shape: Shape) -> None:
        """The one that is asked stays as it is; the same tokens lead to the same bytes."""
        dim = shape.dim if side == "key" else shape.v_dim
        codec = self.unfitted(side, dim, shape.dtype)
        before = copied_tensors(codec)
        x = random_tokens(shape.batch, shape.heads, 64, dim, seed=5, dtype=shape.dtype)
        first, second = codec.fit(x), codec.fit(x.clone())
        assert not codec.fitted
        assert not difference(before, copied_tensors(codec))
        assert first.fitted
        assert not difference(first.state(), second.state())
        codec.fit(random_tokens(1, shape.heads, 64, dim, seed=6, dtype=shape.dtype))
        assert not difference(first.state(), second.state())

    @depends_on("bytes")
    @both_sides
    def test_state_is_all_that_was_learnt(self, side: str, shape: Shape) -> None:
        """A fitted codec holds no other tensor than an unfitted one and its state."""
        dim = shape.dim if side == "key" else shape.v_dim
        codec = self.unfitted(side, dim, shape.dtype)
        fitted = codec.restore(self.fitted(side, dim, shape.dtype, shape.heads).state())
        learnt = sum(tensor.nbytes for tensor in fitted.state().values())
        assert held_bytes(fitted, constants=codec) == learnt > 0
        for name, tensor in fitted.state().items():
            assert tensor.is_contiguous(), name
            assert torch.isfinite(tensor.float()).all(), name

    @depends_on("bytes")
    @both_sides
    def test_a_state_restores_the_codec(self, side: str) -> None:
        """What `state` gives makes a new codec that stores the same bytes."""
        for dim in (64, 80, 128):
            fitted = self.fitted(side, dim, heads=2)
            state = {name: tensor.clone() for name, tensor in fitted.state().items()}
            again = self.unfitted(side, dim).restore(state)
            x = random_tokens(1, 2, 2 * max(TILE, fitted.group), dim, seed=3)
            assert [(f.name, f.bytes_per_token) for f in again.fields] == [
                (f.name, f.bytes_per_token) for f in fitted.fields
            ]
            wanted = fitted.encode(x)
            assert not difference(wanted, again.encode(x))
            decoded = {"decoded": fitted.decode(wanted)}
            assert not difference(decoded, {"decoded": again.decode(wanted)})

    @both_sides
    def test_wrong_states_are_refused(self, side: str) -> None:
        """Nothing, too much, other shapes and NaN are a `FormatError`; the codec is unharmed."""
        codec, state = self.unfitted(side, 64), self.fitted(side, 64).state()
        wrong = [{}, {**state, "no_such_tensor": floats(0.0)}]
        wrong += [{**state, name: floats().view(0, 1, 2)} for name in state]
        wrong += [{n: t for n, t in state.items() if n != name} for name in state]
        wrong += [
            {**state, name: torch.full_like(tensor, torch.nan)}
            for name, tensor in state.items()
            if tensor.is_floating_point() and tensor.dim()
        ]
        for broken in wrong:
            with pytest.raises(FormatError):
                codec.restore(broken)
        assert not codec.fitted

    @both_sides
    def test_wrong_calibration_is_refused(self, side: str) -> None:
        """Another rank or width, no token, NaN and infinity."""
        codec = self.unfitted(side, 64)
        for shape in ((1, 2, 0, 64), (1, 2, 3, 32), (2, 3, 64), (0, 2, 3, 64)):
            with pytest.raises(GeometryError):
                codec.fit(random_tokens(*shape))
        for number in (torch.nan, torch.inf):
            x = random_tokens(1, 2, 3, 64)
            x[0, 1, 2, 3] = number
            with pytest.raises(NonFiniteError):
                codec.fit(x)
        assert not codec.fitted

    @depends_on("bytes")
    @both_sides
    @pytest.mark.parametrize("tokens", [1, 2, 33])
    def test_few_calibration_tokens(self, side: str, tokens: int) -> None:
        """Enough to go on, or refused with a named error."""
        try:
            codec = self.unfitted(side, 64).fit(random_tokens(1, 1, tokens, 64))
        except KVPactError:
            return
        x = random_tokens(1, 1, 2 * max(TILE, codec.group), 64, seed=1)
        y = codec.transform.inverse(codec.decode(codec.encode(x)))
        assert torch.isfinite(y).all()
        assert (y - x).norm() < 1.1 * x.norm()

    @depends_on("bytes")
    @both_sides
    def test_hard_calibration_is_finite_or_refused(self, side: str) -> None:
        """Whatever was learnt from, what is stored later comes back finite, or is refused."""
        codec, ordinary = self.unfitted(side, 80), random_tokens(1, 1, 128, 80)
        for name, magnitude in HARD.items():
            try:
                fitted = codec.fit(floats(magnitude).expand(1, 1, 128, 80).clone())
            except KVPactError:
                assert magnitude > 1e4, f"{name}: ordinary calibration was refused"
                continue
            assert all(torch.isfinite(t.float()).all() for t in fitted.state().values()), name
            for x in (ordinary, torch.full_like(ordinary, magnitude), ordinary * 0):
                try:
                    arrays = fitted.encode(x)
                except KVPactError:
                    assert x.any(), f"{name}: zeros were refused"
                    continue
                assert torch.isfinite(fitted.decode(arrays)).all(), name

    @depends_on("bytes")
    @both_sides
    def test_the_first_tokens_are_learnt_from(self, side: str) -> None:
        """A codec that was never fitted learns from what it encodes first, and keeps that."""
        codec = self.unfitted(side, 64)
        x = random_tokens(1, 2, 4 * max(TILE, codec.group), 64)
        fitted = codec.fit(x)
        assert not difference(fitted.encode(x), codec.encode(x))
        codec.encode(random_tokens(1, 2, x.shape[2], 64, seed=1))
        assert not difference(fitted.state(), codec.state())
