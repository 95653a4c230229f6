"""Contracts of methods that learn from tokens before they encode (`kvpact.methods.fitted`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpact.cache import create_cache
from kvpact.errors import FormatError, GeometryError, LayerIndexError, SpecError
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import parse_spec
from kvpact.testing.cache import CacheContract
from kvpact.testing.cache_base import SMALL, every_shape
from kvpact.testing.cache_paged import PagedCacheContract
from kvpact.testing.data import Shape, random_tokens
from kvpact.testing.depends import depends_on
from kvpact.testing.fitted_base import FittedKit
from kvpact.testing.fitted_checks import FitChecks
from kvpact.testing.held import difference
from kvpact.testing.method import MethodContract
from kvpact.testing.method_base import both_sides


class FittedMethodContract(FitChecks, MethodContract):
    """`MethodContract` for a method whose codecs are `FittedCodec`s, for K and for V.

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
        spec = parse_spec(self.spec)
        codec = (spec.key.key_codec if side == "key" else spec.value.value_codec)(dim, dtype)
        return self.fitted(side, dim, dtype, heads) if isinstance(codec, FittedCodec) else codec

    def sample(self, side: str, shape: Shape, seed: int = 0) -> tuple[Codec, Tensor]:
        """Return a codec fitted to as many heads as the shape has, and tokens for it."""
        dim = shape.dim if side == "key" else shape.v_dim
        codec = self.codec(side, dim, shape.dtype, shape.heads)
        tokens = -(-shape.tokens // codec.group) * codec.group
        x = random_tokens(shape.batch, shape.heads, tokens, dim, seed=seed, dtype=shape.dtype)
        return codec, x.float()

    @depends_on("bytes")
    @both_sides
    def test_rows_heads_and_groups_are_independent(self, side: str, shape: Shape) -> None:
        """As for all methods; but each head may have a basis of its own, so heads stay together."""
        codec, x = self.sample(side, shape)
        whole, again = codec.encode(x), self.sample(side, shape)[0].encode(x.clone())
        assert not difference(whole, again)
        last = x[-1:, :, -codec.group :].clone()
        if not codec.joint:
            last[:, :-1] = last[:, :-1].flip(-1) * 3 + 1  # other heads' tokens don't matter
        for name, array in codec.encode(last).items():
            field = next(field for field in codec.fields if field.name == name)
            count = 1 if field.per_group else codec.group
            wanted = whole[name][-1:, -1:, -count:]
            assert not difference({name: wanted}, {name: array[:, -1:]})


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
            (GeometryError, {**good, 1: (k[..., 1:], v[..., 1:])}),
            (GeometryError, {**good, 1: (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))}),
            (GeometryError, {**good, 1: (k[:, :, :0], v[:, :, :0])}),
            (LayerIndexError, {**good, 2: (k, v)}),
            (FormatError, {**good, 0: ({"no_such": k}, {"no_such": v})}),
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
    @every_shape
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
        """What one sequence learnt could not be shared with others."""
        with pytest.raises(SpecError, match="fit"):
            create_cache(self.spec, SMALL.geometry(), layout="paged", num_pages=4)
