"""Checks of wrong input: a named error, and the cache is exactly as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpact import errors
from kvpact.contract import AttendConfig
from kvpact.spec import parse_spec
from kvpact.testing.cache_base import SMALL, CacheKit, Tokens
from kvpact.testing.data import floats, integers
from kvpact.testing.depends import depends_on

Change = Callable[[Tokens], tuple[Any, ...]]


def _with(index: int, change: Callable[[Any], Any]) -> Change:
    def changed(tokens: Tokens) -> tuple[Any, ...]:
        return tuple(change(x) if i == index else x for i, x in enumerate(tokens))

    return changed


def _every(change: Callable[[Any], Any]) -> Change:
    return lambda tokens: tuple(change(x) for x in tokens)


def _put(number: float) -> Callable[[Any], Any]:
    def changed(x: Any) -> Any:
        x = x.clone()
        x[-1, -1, -1, -1] = number
        return x

    return changed


K, V, Q = 0, 1, 2
# Name: (what is done to k, v and q, the error).
WRONG_TENSORS: dict[str, tuple[Change, type[Exception]]] = {
    "NaN in k": (_with(K, _put(torch.nan)), errors.NonFiniteError),
    "NaN in v": (_with(V, _put(torch.nan)), errors.NonFiniteError),
    "NaN in q": (_with(Q, _put(torch.nan)), errors.NonFiniteError),
    "infinity in k": (_with(K, _put(torch.inf)), errors.NonFiniteError),
    "infinity in v": (_with(V, _put(-torch.inf)), errors.NonFiniteError),
    "rank 3": (_every(lambda x: x[0]), errors.GeometryError),
    "rank 3 of v": (_with(V, lambda x: x[0]), errors.GeometryError),
    "rank 5": (_with(K, lambda x: x[None]), errors.GeometryError),
    "too many heads": (_every(lambda x: x.repeat(1, 2, 1, 1)), errors.GeometryError),
    "too few heads of v": (_with(V, lambda x: x[:, :1]), errors.GeometryError),
    "query heads that don't divide": (_with(Q, lambda x: x[:, :3]), errors.GeometryError),
    "no query heads": (_with(Q, lambda x: x[:, :0]), errors.GeometryError),
    "width of k": (_with(K, lambda x: x[..., :-1]), errors.GeometryError),
    "width of v": (_with(V, lambda x: x[..., :-1]), errors.GeometryError),
    "width of q": (_with(Q, lambda x: x[..., :-1]), errors.GeometryError),
    "other batch": (_every(lambda x: x[:1]), errors.GeometryError),
    "other batch of v": (_with(V, lambda x: x[:1]), errors.GeometryError),
    "other tokens of v": (_with(V, lambda x: x[:, :, :-1]), errors.GeometryError),
    "other tokens of q": (_with(Q, lambda x: x[:, :, :-1]), errors.GeometryError),
    "no tokens": (_every(lambda x: x[:, :, :0]), errors.GeometryError),
    "no rows": (_every(lambda x: x[:0]), errors.GeometryError),
    "fp64": (_every(lambda x: x.double()), errors.DtypeError),
    "integers": (_every(lambda x: x.int()), errors.DtypeError),
    "another dtype": (_every(lambda x: x.half()), errors.DtypeError),
    "another dtype of v": (_with(V, lambda x: x.half()), errors.DtypeError),
    "no tensor": (_with(K, lambda x: x.tolist()), errors.DtypeError),
    "another device": (_every(lambda x: x.to("meta")), errors.DeviceError),
    "another device of v": (_with(V, lambda x: x.to("meta")), errors.DeviceError),
    "another device of q": (_with(Q, lambda x: x.to("meta")), errors.DeviceError),
}
_MASK = torch.ones(2, 1, 3, SMALL.tokens + 3, dtype=torch.bool, device="cpu")
WRONG_CONFIGS: dict[str, tuple[AttendConfig, type[Exception]]] = {
    "groups": (AttendConfig(n_kv_groups=3), errors.GeometryError),
    "padding": (AttendConfig(padding=integers(0, 0, 0)), errors.GeometryError),
    "mask of other tokens": (AttendConfig(mask=_MASK[..., 1:]), errors.GeometryError),
    "mask of other rows": (AttendConfig(mask=_MASK.repeat(2, 1, 1, 1)), errors.GeometryError),
    "mask of rank 2": (AttendConfig(mask=_MASK[0, 0]), errors.GeometryError),
    "mask of integers": (AttendConfig(mask=_MASK.int()), errors.DtypeError),
    "sink logits": (AttendConfig(sink_logits=floats(0.0, 0.0, 0.0)), errors.GeometryError),
}


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let a call that names its tensors take them in the order of `prefill`."""
    return lambda layer, k, v, q, config: call(layer, k=k, v=v, q=q, config=config)


class InputChecks(CacheKit):
    """Nothing is stored of a call that fails."""

    def _calls(self, cache: Any) -> list[Callable[..., Any]]:
        names = ("prefill", *(x for x in ("attend", "store") if x in self.operations))
        return [_named(getattr(cache, name)) for name in names]

    @pytest.mark.parametrize("name", WRONG_TENSORS)
    def test_wrong_tensors(self, name: str) -> None:
        """Rank, heads, width, batch, dtype, device, NaN and infinity, in k, v and q."""
        change, error = WRONG_TENSORS[name]
        empty, cache = self.make_cache(SMALL.geometry(2)), self.filled(SMALL, layers=2)
        wrong = change(self.tokens(SMALL, 3, seed=1))
        for call in self._calls(cache):
            self.refused(cache, error, call, 1, *wrong, None)
        if name != "other batch":  # an empty cache takes any
            for call in self._calls(empty):
                self.refused(empty, error, call, 1, *wrong, None)

    @pytest.mark.parametrize("name", WRONG_CONFIGS)
    def test_wrong_configs(self, name: str) -> None:
        """Groups, padding, masks and sink logits that don't fit."""
        self.needs("attend")
        config, error = WRONG_CONFIGS[name]
        cache = self.filled(SMALL, layers=2)
        self.refused(cache, error, _named(cache.attend), 1, *self.tokens(SMALL, 3, seed=1), config)
        if name in ("groups", "padding"):
            self.refused(cache, error, cache.prefill, 1, *self.tokens(SMALL, 3, seed=1), config)

    @pytest.mark.parametrize("layer", [-1, 2, 1.0, None, True])
    def test_wrong_layers(self, layer: Any) -> None:
        """Layers that are not there."""
        cache, tokens = self.filled(SMALL, layers=2), self.tokens(SMALL, 1, seed=1)
        for call in [*self._calls(cache), cache.decode]:
            self.refused(cache, errors.LayerIndexError, call, layer, *tokens, AttendConfig())
        self.refused(cache, errors.LayerIndexError, cache.seq_len, layer)
        if layer is not None:
            self.refused(cache, errors.LayerIndexError, cache.reset, layer)

    def test_decode_takes_one_token(self) -> None:
        """More go through `attend` or `prefill`."""
        cache, tokens = self.filled(SMALL, layers=2), self.tokens(SMALL, 2, seed=1)
        self.refused(cache, errors.GeometryError, cache.decode, 0, *tokens, AttendConfig())

    def test_all_layers_hold_the_same_rows(self) -> None:
        """A layer can't begin with another batch than the others hold."""
        cache = self.make_cache(SMALL.geometry(2))
        self.append(cache, self.tokens(SMALL, 3))
        wrong = tuple(x[:1] for x in self.tokens(SMALL, 3))
        self.refused(cache, errors.GeometryError, cache.prefill, 1, *wrong, None)

    def limited(self) -> tuple[Any, int]:
        """Return a cache of two layers, and for how many tokens of `SMALL` it has room."""
        return self.make_cache(SMALL.geometry(2), max_tokens=72), 72

    def test_full(self) -> None:
        """Tokens that don't all fit are not stored in part; those that fit still are."""
        cache, room = self.limited()
        self.append(cache, self.tokens(SMALL, room - 2))
        tokens = self.tokens(SMALL, 3, seed=1)
        for call in self._calls(cache):
            self.refused(cache, errors.CacheFull, call, 0, *tokens, None)
        self.append(cache, self.tokens(SMALL, 2, seed=1))
        one = self.tokens(SMALL, 1, seed=1)
        self.refused(cache, errors.CacheFull, cache.decode, 0, *one, AttendConfig())
        assert cache.seq_len(0) == room

    @depends_on("bytes")
    @pytest.mark.parametrize("number", [7e4, 1e6, 1e30, 3e38])
    @pytest.mark.parametrize("side", [K, V], ids=["k", "v"])
    def test_what_is_out_of_range_is_refused_when_it_comes(self, side: int, number: float) -> None:
        """A token that is taken is never refused later, when its group is complete."""
        cache = self.filled(SMALL, layers=2)
        wrong = _with(side, _put(number))(self.tokens(SMALL, 1, seed=1))
        for call in self._calls(cache):
            before = self.state(cache)
            try:
                call(1, *wrong, None)
            except errors.NonFiniteError:
                self.assert_same(before, cache)
        for seed in range(2, 5):
            self.append(cache, self.tokens(SMALL, 90, seed), layer=1)

    @pytest.mark.parametrize("exact_new", [True, False], ids=["exact", "as stored"])
    @pytest.mark.parametrize("side", ["key", "value"])
    def test_an_error_in_the_middle(
        self, side: str, exact_new: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a codec fails, neither K nor V has the tokens; the next call works."""
        method = type(getattr(parse_spec(self.spec), side))
        make, broken = getattr(method, f"{side}_codec"), [False]

        def make_fragile(*args: Any) -> Any:
            codec = make(*args)
            kind: Any = type(codec)

            def fragile(self: Any, *arrays: Any) -> Any:
                if broken[0]:
                    raise errors.NonFiniteError("the codec refuses these tokens")
                return kind.encode(self, *arrays)

            # A subclass and no attribute: a codec that `fit` copies would keep the latter, bound to
            # the one that was copied.
            codec.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "encode": fragile})
            return codec

        monkeypatch.setattr(method, f"{side}_codec", make_fragile)
        config = AttendConfig(exact_new=exact_new)
        cache = self.make_cache(SMALL.geometry(2))
        tokens = [self.tokens(SMALL, 130, seed) for seed in range(3)]
        cache.prefill(0, *tokens[0], config)
        if self._never_encodes(cache, tokens[1], broken):
            pytest.skip("the cache doesn't use the codec")
        broken[0] = True
        for layer in range(2):
            for call in self._calls(cache):
                self.refused(cache, errors.NonFiniteError, call, layer, *tokens[1], config)
        broken[0] = False
        cache.prefill(0, *tokens[1], config)
        whole = self.make_cache(SMALL.geometry(2))
        for part in tokens[:2]:
            whole.prefill(0, *part, config)
        self.assert_same(whole, cache)

    def _never_encodes(self, cache: Any, tokens: Tokens, broken: list[bool]) -> bool:
        broken[0] = True
        try:
            if "fork" in self.operations:
                cache.fork().prefill(0, *tokens, None)
                return True
        except errors.NonFiniteError:
            pass
        finally:
            broken[0] = False
        return "fork" not in self.operations
