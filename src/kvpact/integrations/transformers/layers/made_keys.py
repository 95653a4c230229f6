"""Layers whose keys are made of their values (K = V): only values are held.

Gemma 4's full layers may have no `v_proj`: of `x = k_proj(h)` values are `x / rms(x)`, and keys
`RoPE_t(w * x / rms(x))`, with the weights `w` of `k_norm`. So keys are made as they are read. Which
position each token has is found by its key, and remembered: a key that a call brings is always the
one that would be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvpact.cache.layer.stored import Step
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, KVPactError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers.held.new_tokens import NewTokens
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.full import CompressedLayer, returned_pair
from kvpact.integrations.transformers.model.fallback import say_once
from kvpact.integrations.transformers.model.offsets import modules_named, rope_by_length, rotaries
from kvpact.integrations.weights import read_if_known
from kvpact.snapshot import RecordState

ROUNDINGS = 4
"""The tolerance of keys made of rounded values against the model's, in the dtype's epsilons."""
PADDING = (0, 1)  # positions that models give to padding
LEAST = 1024  # positions for which cosines and sines are made at a time, at least


_Table = tuple[Tensor, Tensor]
_tables: WeakKeyDictionary[Any, dict[tuple[object, ...], _Table]] = WeakKeyDictionary()
"""Of each RoPE: cosines and sines of the pairs of channels that turn, `[positions, P]`."""


class Keys:
    """Makes keys of values at known positions (see `kvpact.kernels.torch.latent.KeyMaking`).

    `weight`: `[D]` fp32; `table`: cosines and sines by position; `positions`: `[B or 1, T]`, or
    None where they are those of a text: 0, 1, 2, ….
    """

    def __init__(self, weight: Tensor, table: _Table, positions: Tensor | None) -> None:
        self._weight, self._table, self._positions = weight, table, positions
        self._queries: tuple[Tensor, Tensor, Tensor] | None = None

    def _turns(self, v: Tensor, start: int) -> tuple[Tensor, Tensor, slice, slice]:
        """Return cosines and sines `[B or 1, 1, T, P]`, and the channels that turn together."""
        known, places = self._positions, slice(start, start + v.shape[2])
        at = (None, places) if known is None else (known[:, places].long(),)
        cos, sin = (part[at].unsqueeze(1).to(v.dtype) for part in self._table)
        pairs, half = cos.shape[3], v.shape[3] // 2
        return cos, sin, slice(0, pairs), slice(half, half + pairs)

    def make(self, v: Tensor, start: int = 0) -> Tensor:
        """Return the keys of values `[B, H, T, D]`, in their dtype."""
        x = (v.to(torch.float32) * self._weight).to(v.dtype)
        cos, sin, one, two = self._turns(v, start)
        a, b = x[..., one], x[..., two]
        x[..., one], x[..., two] = a * cos - b * sin, b * cos + a * sin
        return x

    def logits(self, rows: Tensor, v: Tensor, start: int) -> Tensor:
        """Return `rows @ make(v, start).mT`: keys are made of the channels that turn alone."""
        cos, sin, one, two = self._turns(v, start)
        if self._queries is None:
            whole = rows * self._weight
            whole[..., one], whole[..., two] = 0, 0
            self._queries = whole, rows[..., one], rows[..., two]
        whole, q_one, q_two = self._queries
        a, b = v[..., one] * self._weight[one], v[..., two] * self._weight[two]
        logits = whole @ v.mT
        logits += q_one @ (a * cos).addcmul_(b, sin, value=-1).mT
        return logits.add_(q_two @ (b * cos).addcmul_(a, sin).mT)


class KeyMaker:
    """Knows how the keys of one layer are made of its values."""

    def __init__(
        self, attention: ref[Any], rotary: ref[Any], kind: str | None, weight: Tensor | None = None
    ) -> None:
        self._attention, self._rotary = attention, rotary  # the modules with `k_norm`, and of RoPE
        self._kind = kind  # what RoPE calls the layer, where it has several
        self.weight = weight  # with which keys of all tokens held are made; None before the first

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing of it changes

    def begun(self) -> KeyMaker:
        """Return a maker with the model's present weights, for all tokens to come."""
        attention = _there(self._attention)
        weight = read_if_known(attention.k_norm, "weight", (attention,))
        if weight is None:
            raise KVPactError(
                "the weights of k_norm can't be read, with which keys are made: make the cache "
                "with k_eq_v=False, which holds K and V apart"
            )
        weight = weight.to(torch.float32, copy=True)
        return KeyMaker(self._attention, self._rotary, self._kind, weight)

    def at(self, positions: Tensor | None, like: Tensor, end: int = 0) -> Keys:
        """Return the maker of keys at positions `[B or 1, T]`; None: of a text of `end` tokens."""
        assert self.weight is not None
        end = end if positions is None else int(positions.max()) + 1
        table = self._table(end, like.dtype, like.device)
        return Keys(self.weight.to(like.device), table, positions)

    def _table(self, length: int, dtype: torch.dtype, device: torch.device) -> _Table:
        """Return cosines and sines as the model's own RoPE makes them. Raises `KVPactError`."""
        rotary = _there(self._rotary)
        known, key = _tables.setdefault(rotary, {}), (self._kind, dtype, device)
        old = known.get(key)
        if old is not None and len(old[0]) >= length:
            return old
        count = max(1 << (length - 1).bit_length(), LEAST)
        places = torch.arange(count, dtype=torch.long, device=device)
        like, kind = places.new_empty(0, dtype=dtype), (self._kind,) if self._kind else ()
        with torch.no_grad():
            cos, sin = (x[0] for x in rotary(like, places[None], *kind))
        half = cos.shape[1] // 2
        turn = (sin[:, :half] != 0).any(0) | (cos[:, :half] != 1).any(0)
        pairs = int(turn.nonzero().max()) + 1 if turn.any() else 0
        new = known[key] = cos[:, :pairs].clone(), sin[:, :pairs].clone()
        if old is not None and not torch.equal(new[1][: len(old[1])], old[1]):
            raise KVPactError("the model's RoPE has changed: begin again with reset()")
        return new

    def are_made(self, v: Tensor, positions: Tensor, k: Tensor) -> bool:
        """Return whether keys are those made of values, up to rounding (mostly none in fp32)."""
        assert self.weight is not None
        made = self.at(positions, v).make(v)
        if torch.equal(made, k):
            return True
        size = (v.to(torch.float32) * self.weight.to(v.device)).abs()
        bound = (size + size.roll(size.shape[3] // 2, -1)) * (ROUNDINGS * torch.finfo(k.dtype).eps)
        return bool(((made.float() - k.float()).abs() <= bound).all())

    def found(self, k: Tensor, v: Tensor, expected: Tensor) -> Tensor | None:
        """Return positions `[B, S]` at which keys are made of values: `expected`, or others."""
        if self.are_made(v, expected, k):
            return expected
        wide = expected.expand(len(k), -1)
        each = zip(torch.split(k, 1), torch.split(v, 1), torch.split(wide, 1), strict=True)
        found = [self._row(x, y, at, int(expected.max()) + 1) for x, y, at in each]
        rows = [row for row in found if row is not None]
        return torch.cat(rows) if len(rows) == len(found) else None

    def _row(self, k: Tensor, v: Tensor, expected: Tensor, most: int) -> Tensor | None:
        """Return one row's positions, below `most`: that follow one another, after padding."""
        ends = torch.arange(most, dtype=torch.long, device=v.device)[None]
        made = self.at(ends, v).make(v[:, :1, -1:].expand(-1, -1, most, -1))
        end = (made.float() - k[:, :1, -1:].float()).abs().amax((0, 1, 3)).argmin()
        new = expected.shape[1]
        steps = end + torch.arange(1 - new, 1, dtype=torch.long, device=v.device)[None]
        tried = [expected, *(torch.where(steps < 0, x, steps) for x in PADDING)]
        tried += [torch.full_like(steps, x) for x in PADDING]
        return next((x for x in tried if self.are_made(v, x, k)), None)


def _there(known: ref[Any]) -> Any:
    module = known()
    if module is None:
        raise KVPactError("the model is gone, by whose weights keys are made: keep it")
    return module


class ValueTokens(NewTokens):
    """The values of one `update`, of which keys are made when somebody reads them."""

    __slots__ = ("_keys", "_positions")
    by_steps = True

    def __init__(
        self,
        shared: SharedState,
        layer: int,
        k: Tensor,
        v: Tensor,
        keys: KeyMaker,
        positions: Tensor | None,
        again: bool,
    ) -> None:
        super().__init__(shared, layer, v[..., :0], v, again)
        self._dtypes, self._widths = (k.dtype, v.dtype), (k.shape[3], v.shape[3])
        self._keys, self._positions = keys, positions

    def read(self) -> tuple[Tensor, Tensor]:
        """Return K and V of all tokens, which wait as they are."""
        k = self._made(self.v)
        self.read_as(k)
        return k, self.v

    def part(self, side: str) -> Tensor:
        """Return K (``k``), made of values, or V (``v``) of all tokens."""
        if side == "k" and self.fresh:
            return self._made(self.v).to(self._dtypes[0])
        return super().part(side)

    def _made(self, v: Tensor) -> Tensor:
        known = self._positions
        known = None if known is None else known[:, : v.shape[2]]
        return self._keys.at(known, self.v, v.shape[2]).make(v)

    def _all(self) -> tuple[Tensor, Tensor]:
        if self._parts is None:
            v = super()._all()[1]
            self._parts = None  # until keys are made
            self._parts = self._made(v), v
        return self._parts

    def _over(self, step: Step, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over a step: keys are made of its values chunk by chunk."""
        return step.attend_made(q, config, self._keys.at(self._positions, self.v, self.total))


class CompressedValueLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """A layer of which values alone are held; K and V apart where keys are not made of them."""

    def __init__(self, shared: SharedState, index: int, keys: KeyMaker) -> None:
        super().__init__(shared, index)
        self._keys = keys
        self.reset()

    def reset(self) -> None:
        """Forget positions and weights."""
        self._positions: Tensor | None = None
        self._begun: KeyMaker | None = None

    @property
    def apart(self) -> bool:
        """True if the layer holds K and V apart, because its first keys were other ones."""
        cache = self._shared.held[self._index]
        return cache is not None and cache.geometry.head_dim > 0

    @property
    def positions(self) -> Tensor | None:
        """Positions `[B, T]` of the tokens held; None where they are 0, 1, 2, …."""
        held, length = self._positions, self.get_seq_length()
        return None if held is None or not length else held[:, :length]

    @positions.setter
    def positions(self, positions: Tensor) -> None:
        self._positions = positions

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: positions are those of the tokens held."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; keys not made of values are held apart, later ones a `KVPactError`."""
        shared, index = self._shared, self._index
        if self.apart or not self._place(key_states.detach(), value_states.detach()):
            return super().update(key_states, value_states)
        keys = self._begun
        assert keys is not None
        if index == 0 or shared.held[index] is None:
            shared.attention = shared.config._attn_implementation
        # None wait any more: to know how many rows are held, `_place` has stored them.
        given = key_states, value_states, keys, self._positions, self.read_again
        tokens = ValueTokens(shared, index, *given)
        first = tokens.total == key_states.shape[2]
        if first and tokens.wait_whole(tokens.k, tokens.v):
            return tokens.read()
        if index + 1 == len(shared.waiting):
            shared.look(tokens.total - key_states.shape[2])
        # What is exact is read as a whole: the model's own attention gives the very same numbers.
        exact = self.spec.value.name == "none"
        return returned_pair(tokens, key_states, value_states, exact)

    def _place(self, k: Tensor, v: Tensor) -> bool:
        """Find the positions of new tokens; False where the first keys are not made of values."""
        held, known, cache = self.get_seq_length(), self.positions, self._shared.held[self._index]
        batch = None if cache is None or not held else self.batch_size
        if batch not in (None, len(k)):
            raise GeometryError(
                f"batch {len(k)}, but the cache holds {batch} rows; reset, select or repeat"
            )
        begun = self._begun if held and self._begun is not None else self._keys.begun()
        expected = torch.arange(held, held + k.shape[2], dtype=torch.long, device=v.device)[None]
        if known is not None:
            expected = expected + (known[:, -1:].long() - (held - 1))
        found = None
        if k.shape == v.shape and k.dtype is v.dtype:
            found = begun.found(k, v, expected)
        if found is None and not bool(v.isfinite().all() & k.isfinite().all()):
            found = expected  # refused by whoever stores them
        if found is None and cache is not None:
            raise KVPactError(
                "keys of this call are not those that are made of its values (K = V): its "
                "positions don't follow those before, or the weights have changed. Begin again "
                "with a cache made with k_eq_v=False, which holds K and V apart"
            )
        if found is None:
            self._positions = None  # of a first call that was refused
            say_once(
                "k_eq_v",
                "keys of this model's first call are not those that are made of its values, at "
                "positions that follow one another: K and V are held apart, as with k_eq_v=False",
                self._shared,
            )
            return False
        if known is None and found is not expected:
            known = torch.arange(held, dtype=torch.int32, device=v.device).expand(len(k), -1)
        if known is not None:
            known = torch.cat([known, found.to(torch.int32)], 1)
        self._positions, self._begun = known, begun
        return True

    def _whole(self, side: str) -> Tensor | None:
        v = super()._whole("v")
        if side == "v" or v is None or self.apart:
            return v if side == "v" else super()._whole(side)
        begun = self._begun or self._keys.begun()
        return begun.at(self.positions, v, v.shape[2]).make(v)


def check_positions(
    layers: Mapping[int, Any], records: Sequence[RecordState], geometry: CacheGeometry, tokens: int
) -> None:
    """Raise `GeometryError` where a snapshot is of values alone and does not fit."""
    known = {x.layer: x.tensor for x in records if x.name == "positions"}
    alone = {i for i, x in layers.items() if isinstance(x, CompressedValueLayer)}
    good = known.keys() <= (set() if geometry.head_dim else alone)
    for held in known.values():
        good = good and held.dtype is torch.int32 and held.dim() == 2
        good = good and bool(((held >= 0) & (held < max(tokens, 2))).all())
    if not good or not (geometry.head_dim or alone):
        raise GeometryError(
            "the snapshot is of a cache of values alone, made with k_eq_v=True, and does not fit "
            "this one: make it with k_eq_v=True of the same model"
        )


def attentions_without_values(model: Any) -> dict[int, Any]:
    """Return the attention modules that normalise what `k_proj` gives and have no `v_proj`."""
    found = {}
    for _, attention in modules_named(model, "self_attn", "attention"):
        layer, norm = getattr(attention, "layer_idx", None), getattr(attention, "k_norm", None)
        alone = getattr(attention, "v_proj", attention) is None and hasattr(norm, "weight")
        if alone and type(layer) is int:
            found[layer] = attention
    return found


def key_makers(model: Any, layers: Sequence[int]) -> dict[int, KeyMaker]:
    """Return the makers of keys of layers without `v_proj`; or `SpecError`."""
    if not hasattr(model, "modules"):
        raise SpecError("k_eq_v=True makes keys by a model's weights: give the model, no config")
    config = model.config.get_text_config(decoder=True)
    kinds = dict(enumerate(getattr(config, "layer_types", None) or []))
    found = {}
    for decoder, rotary in rotaries(model):  # a tower for images has its own
        alone = attentions_without_values(decoder)
        for layer in alone.keys() & set(layers):
            kind = kinds.get(layer)
            kind = kind if hasattr(rotary, f"{kind}_inv_freq") else None
            found[layer] = KeyMaker(ref(alone[layer]), ref(rotary), kind)
    if not found:
        raise SpecError(
            "k_eq_v=True: no layer of this model makes keys of its values; leave k_eq_v out"
        )
    if kind := rope_by_length(config.to_dict()):
        raise SpecError(
            f"k_eq_v=True: RoPE of type {kind!r} turns equal tokens otherwise in longer texts, so "
            "keys have to be held; leave k_eq_v out"
        )
    return found
