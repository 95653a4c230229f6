"""The kits of methods that learn: codecs that are fitted, caches and pages of them."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvpact import errors
from kvpact.cache import create_cache
from kvpact.formats import TILE
from kvpact.geometry import CacheGeometry
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.testing.cache import CacheContract
from kvpact.testing.cache_base import SMALL
from kvpact.testing.cache_paged import PagedCacheContract
from kvpact.testing.data import Shape, floats, random_tokens
from kvpact.testing.depends import depends_on
from kvpact.testing.held import copied_tensors, difference, held_bytes
from kvpact.testing.method import HARD, MethodContract
from kvpact.testing.method_base import both_sides, new_codec

State = dict[str, Tensor]

_STATES: dict[tuple[Any, ...], State] = {}


class FittedKit:
    """Codecs that are fitted; fitting takes time, so each state is kept for the test process."""

    spec: ClassVar[str]
    calibration_tokens: ClassVar[int] = 512

    def unfitted(self, side: str, dim: int, dtype: torch.dtype = torch.float32) -> FittedCodec:
        """Return a new codec for K (``key``) or V (``value``) that has learnt nothing."""
        codec = new_codec(self.spec, side, dim, dtype)
        if not isinstance(codec, FittedCodec):
            pytest.skip(f"{side}: {type(codec).__name__} learns nothing")
        return codec

    def calibration_data(self, side: str, heads: int, dim: int, offset: float = 0.0) -> Tensor:
        """Return calibration tokens `[2, heads, T, dim]`."""
        seed = 501 if side == "key" else 502
        return random_tokens(2, heads, self.calibration_tokens, dim, seed=seed, offset=offset)

    def fitted(
        self,
        side: str,
        dim: int,
        dtype: torch.dtype = torch.float32,
        heads: int = 1,
        offset: float = 0.0,
    ) -> FittedCodec:
        """Return a fitted codec whose state shares no memory."""
        codec = self.unfitted(side, dim, dtype)
        key = (self.spec, self.calibration_tokens, side, dim, dtype, heads, offset)
        if key not in _STATES:
            tokens = self.calibration_data(side, heads, dim, offset).to(dtype)
            _STATES[key] = codec.fit(tokens).state()
        return codec.restore({name: tensor.clone() for name, tensor in _STATES[key].items()})

    def calibration(self, geometry: CacheGeometry) -> dict[int, tuple[State, State]]:
        """Return the learnt states of every layer's codecs, for `create_cache`."""
        heads, dtype = geometry.num_kv_heads, geometry.dtype or torch.float32
        # Keys have constants of their own, as those that the cache is given (`CacheKit.tokens`).
        return {
            layer: (
                self._state("key", geometry.head_dim, dtype, heads, 1.0),
                self._state("value", geometry.value_dim, dtype, heads, 0.0),
            )
            for layer in range(geometry.num_layers)
        }

    def _state(self, side: str, dim: int, dtype: torch.dtype, heads: int, offset: float) -> State:
        # One side may be a method that learns nothing.
        if not isinstance(new_codec(self.spec, side, dim, dtype), FittedCodec):
            return {}
        return self.fitted(side, dim, dtype, heads, offset).state()


class FitChecks(FittedKit):
    """`fit`, `state` and `restore`."""

    @both_sides()
    def test_an_unfitted_codec_says_so(self, side: str) -> None:
        """It has no state, and decodes nothing."""
        codec = self.unfitted(side, 64)
        assert not codec.fitted
        assert codec.state() == {}
        with pytest.raises(errors.SpecError, match="fit"):
            codec.require_fitted()
        with pytest.raises(errors.SpecError, match="fit"):
            codec.decode(self.fitted(side, 64).encode(random_tokens(1, 1, TILE, 64)))
        fitted = self.fitted(side, 64)
        assert fitted.fitted
        fitted.require_fitted()

    @both_sides("bytes")
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

    @both_sides("bytes")
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

    @both_sides("bytes")
    def test_a_state_restores_the_codec(self, side: str) -> None:
        """A codec restored from `state` stores the same bytes."""
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

    @both_sides()
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
            with pytest.raises(errors.FormatError):
                codec.restore(broken)
        assert not codec.fitted

    @both_sides()
    def test_wrong_calibration_is_refused(self, side: str) -> None:
        """Another rank or width, no token, NaN and infinity."""
        codec = self.unfitted(side, 64)
        for shape in ((1, 2, 0, 64), (1, 2, 3, 32), (2, 3, 64), (0, 2, 3, 64)):
            with pytest.raises(errors.GeometryError):
                codec.fit(random_tokens(*shape))
        for number in (torch.nan, torch.inf):
            x = random_tokens(1, 2, 3, 64)
            x[0, 1, 2, 3] = number
            with pytest.raises(errors.NonFiniteError):
                codec.fit(x)
        assert not codec.fitted

    @both_sides("bytes")
    @pytest.mark.parametrize("tokens", [1, 2, 33])
    def test_few_calibration_tokens(self, side: str, tokens: int) -> None:
        """Enough to go on, or refused with a named error."""
        try:
            codec = self.unfitted(side, 64).fit(random_tokens(1, 1, tokens, 64))
        except errors.KVPactError:
            return
        x = random_tokens(1, 1, 2 * max(TILE, codec.group), 64, seed=1)
        y = codec.transform.inverse(codec.decode(codec.encode(x)))
        assert torch.isfinite(y).all()
        assert (y - x).norm() < 1.1 * x.norm()

    @both_sides("bytes")
    def test_hard_calibration_is_finite_or_refused(self, side: str) -> None:
        """Whatever was learnt from, what is stored later comes back finite, or is refused."""
        codec, ordinary = self.unfitted(side, 80), random_tokens(1, 1, 128, 80)
        for name, magnitude in HARD.items():
            try:
                fitted = codec.fit(floats(magnitude).expand(1, 1, 128, 80).clone())
            except errors.KVPactError:
                assert magnitude > 1e4, f"{name}: ordinary calibration was refused"
                continue
            assert all(torch.isfinite(t.float()).all() for t in fitted.state().values()), name
            for x in (ordinary, torch.full_like(ordinary, magnitude), ordinary * 0):
                try:
                    arrays = fitted.encode(x)
                except errors.KVPactError:
                    assert x.any(), f"{name}: zeros were refused"
                    continue
                assert torch.isfinite(fitted.decode(arrays)).all(), name

    @both_sides("bytes")
    def test_the_first_tokens_are_learnt_from(self, side: str) -> None:
        """A codec that was never fitted learns from what it encodes first, and keeps that."""
        codec = self.unfitted(side, 64)
        x = random_tokens(1, 2, 4 * max(TILE, codec.group), 64)
        fitted = codec.fit(x)
        assert not difference(fitted.encode(x), codec.encode(x))
        codec.encode(random_tokens(1, 2, x.shape[2], 64, seed=1))
        assert not difference(fitted.state(), codec.state())


class FittedMethodContract(FitChecks, MethodContract):
    """`MethodContract` for a method whose codecs are of the class `FittedCodec`, for K and for V.

    All checks of `MethodContract` are made with codecs that `fit` has fitted to normally
    distributed tokens. In addition: what is learnt is in `state`, and only there; `fit` leaves its
    codec as it is; wrong calibration and wrong states are refused by name.

    Attributes
    ----------
    spec, max_relative_error
        As in `MethodContract`.
    calibration_tokens : int
        Tokens per row that codecs learn from, in two rows.
    """

    def codec(
        self, side: str, dim: int, dtype: torch.dtype = torch.float32, heads: int = 1
    ) -> Codec:
        """Return a fitted codec; one side may be a codec that learns nothing."""
        codec = new_codec(self.spec, side, dim, dtype)
        return self.fitted(side, dim, dtype, heads) if isinstance(codec, FittedCodec) else codec


class _CalibrationChecks(FittedKit):
    """Wrong calibration of a cache."""

    def _options(self) -> dict[str, Any]:
        return {}

    def test_wrong_calibration_of_a_cache_is_refused(self) -> None:
        """Other heads and widths, layers that are not there, states of other codecs."""
        geometry = SMALL.geometry(2)
        k, v = self.calibration_data("key", 2, 32), self.calibration_data("value", 2, 48)
        good = self.calibration(geometry)
        wrong: list[tuple[type[Exception], Any]] = [
            (errors.GeometryError, {**good, 1: (k[..., 1:], v[..., 1:])}),
            (errors.GeometryError, {**good, 1: (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))}),
            (errors.GeometryError, {**good, 1: (k[:, :, :0], v[:, :, :0])}),
            (errors.LayerIndexError, {**good, 2: (k, v)}),
            (errors.FormatError, {**good, 0: ({"no_such": k}, {"no_such": v})}),
        ]
        for error, calibration in wrong:
            with pytest.raises(error):
                create_cache(self.spec, geometry, calibration=calibration, **self._options())

    def test_tokens_and_states_calibrate_alike(self) -> None:
        """A cache that learns from tokens equals one that is given what codecs learnt from them."""
        geometry = SMALL.geometry()
        k = self.calibration_data("key", 2, 32, offset=1.0)
        v = self.calibration_data("value", 2, 48)
        given = {0: (k, v)}, self.calibration(geometry)
        usages = [
            create_cache(self.spec, geometry, calibration=one, **self._options()) for one in given
        ]
        shown = []
        for cache in usages:
            cache.prefill(0, random_tokens(2, 2, 200, 32), random_tokens(2, 2, 200, 48), None)
            result = cache.prefill(0, random_tokens(2, 2, 1, 32), random_tokens(2, 2, 1, 48), None)
            shown.append({"k": result.k, "v": result.v})
        assert usages[0].memory_usage() == usages[1].memory_usage()
        assert not difference(*shown)


class FittedCacheContract(_CalibrationChecks, CacheContract):
    """`CacheContract` for a method that learns, in the contiguous cache, calibrated."""

    @depends_on("bytes")
    def test_what_was_learnt_is_counted(self, shape: Shape) -> None:
        """An empty cache holds what was learnt; a full one that and its slots, as declared."""
        learnt = self.learnt_bytes(shape.geometry())
        assert learnt > 0
        cache = self.make_cache(shape.geometry())
        assert cache.memory_usage() == cache.stats()["bytes"]["total"] == learnt
        cache = self.filled(shape)
        slots = sum(
            field.bytes_per_token * stream.packed * shape.batch * shape.heads
            for stream in self.streams(cache)
            for field in stream.codec.fields
        )
        sizes = cache.stats()["bytes"]
        assert abs(sizes["codes"] + sizes["side"] - learnt - slots) < 1


class FittedPagedCacheContract(_CalibrationChecks, PagedCacheContract):
    """`PagedCacheContract` for a method that learns: its pages stand on one fixed basis."""

    def _options(self) -> dict[str, Any]:
        return {"layout": "paged", "num_pages": 16}

    def test_pages_need_calibration(self) -> None:
        """Pages refuse methods that learn from one sequence: others can't share its state."""
        with pytest.raises(errors.SpecError, match="fit"):
            create_cache(self.spec, SMALL.geometry(), layout="paged", num_pages=4)
