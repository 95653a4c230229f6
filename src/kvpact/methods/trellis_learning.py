"""Keys of `trellis`: a base for each token, then weights, sorted blocks and the trellis.

Learnt are the first key, weights of channels, their order, and deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.errors import NonFiniteError
from kvpact.formats.form import TrellisForm
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.bases import LEARNT_FROM, Bases, first_key
from kvpact.methods.context import Context, mean_over_tokens
from kvpact.methods.fitted import Calibrating, KeysThatLearn
from kvpact.methods.trellis_codec import LARGEST_TOKEN, TrellisVectors, trellis_of
from kvpact.quantizers.checks import require
from kvpact.quantizers.numbers import half


def quarters(dim: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return sorted channels' blocks (quarter, half, quarter) and bits; one if few."""
    quarter = dim // 4 // 16 * 16
    if quarter == 0 or dim % 16 or bits == 6:
        return ((dim, bits),)
    return ((quarter, bits + 1), (dim - 2 * quarter, bits), (quarter, bits - 1))


class TreatedKeys(Codec):
    """Keys, with the state that `TrellisKeyCodec` has learnt; nothing is where bases are means."""

    # No base is farther than nothing, weights have a mean square of 1, deviations are at least 1:
    # so a scale is at most the largest number, but for rounding.
    max_abs = LARGEST_TOKEN
    _state: Mapping[str, Tensor]

    def __init__(
        self,
        dim: int,
        bits: int,
        states: int,
        *,
        center: int,
        first: bool,
        weights: bool,
        blocks: bool,
        seed: int = 0,
    ) -> None:
        learnt = max(LEARNT_FROM, center)
        self._dim, self._state = dim, {}
        self.weighted, self.sorted = weights, blocks
        self.group = center or learnt
        self.learns_from = learnt if weights or blocks or first else 0
        held = quarters(dim, bits) if blocks else ((dim, bits),)
        self._store(trellis_of(held, states, seed, center, first))

    def _store(self, known: TrellisForm) -> None:
        """Store vectors of a trellis, and bases with them."""
        self.trellis, self._vectors = known, TrellisVectors(known, "token")
        self._bases = Bases(self._dim, known.center, known.first)
        self.form, self.fields = self._vectors.form, self._vectors.form.fields

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Choose bases, weigh, sort, rotate; find the codes."""
        heads = x.shape[1]
        ones = x.new_ones(heads, self._dim)
        weight = self._state["weight"].to(torch.float32) if self.weighted else ones
        base, flag, side = self._bases.choose(x, self._first_key(x), weight, frozen)
        y = (x - base) * weight.view(1, heads, 1, -1)
        return self._vectors.encode(self._rotated(y)) | side | flag

    def _first_key(self, x: Tensor) -> Tensor:
        """Return the first key, `[H, D]` fp32; zero where it is no base."""
        if not self.trellis.first:
            return x.new_zeros(x.shape[1], self._dim)
        return self._state["first"].to(torch.float32)

    def _rotated(self, y: Tensor) -> Tensor:
        """Sort channels into blocks; rotate each and divide it by its deviation."""
        if "order" in self._state:
            y = y.gather(-1, self._order(y))
        parts = list(torch.split(y, self._vectors.widths, -1))
        parts = [
            rotation.forward(part)
            for rotation, part in zip(self._vectors.rotations, parts, strict=True)
        ]
        if "deviation" in self._state:
            sizes = [torch.ones_like(size) / size for size in self._deviations()]
            parts = [part * inverse for part, inverse in zip(parts, sizes, strict=True)]
        return torch.cat(parts, -1)

    def _order(self, y: Tensor) -> Tensor:
        order = self._state["order"].to(torch.int64)
        return order.view(1, order.shape[0], 1, -1).expand(y.shape)

    def _deviations(self) -> list[Tensor]:
        return [size.view(1, -1, 1, 1) for size in self._state["deviation"].to(torch.float32).T]

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo it all."""
        y = self._vectors.decode(arrays)
        parts = list(torch.split(y, self._vectors.widths, -1))
        if "deviation" in self._state:
            parts = [part * size for part, size in zip(parts, self._deviations(), strict=True)]
        parts = [
            rotation.inverse(part)
            for rotation, part in zip(self._vectors.rotations, parts, strict=True)
        ]
        y = torch.cat(parts, -1)
        if "order" in self._state:
            y = torch.empty_like(y).scatter_(-1, self._order(y), y)
        if self.weighted:
            y = y / self._state["weight"].to(torch.float32).view(1, -1, 1, self._dim)
        return self._bases.add(y, arrays, self._first_key(y))


_FLOOR = 0.001  # of the mean energy: added, so that no channel counts for nothing
_MOST_WEIGHT = 1.01  # mean square of the weights: 1, but for rounding


class TrellisKeyCodec(TreatedKeys, KeysThatLearn):
    """Keys with weights, sorted blocks or a first key, which are learnt."""

    encode, decode = KeysThatLearn.encode, KeysThatLearn.decode
    _encode, _decode = TreatedKeys.encode, TreatedKeys.decode

    def state_fields(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return what is learnt: first key, weights, order and deviations."""
        found = {"first": (self._dim, torch.float16)} if self.trellis.first else {}
        if self.weighted or self.sorted:
            found["weight"] = self._dim, torch.float16
            found["order"] = self._dim, torch.int16
            found["deviation"] = len(self.trellis.blocks), torch.float16
        return found

    def calibrated(self, x: Tensor, known: Calibrating) -> TrellisKeyCodec:
        """Return a codec that learnt from calibration keys and their queries."""
        fitted = self.fit(x)  # checks them
        whole = x.shape[2] // self.group * self.group or x.shape[2]
        context = Context(None, known.sinks)
        shown = known.query_energy[:, :, :whole]
        context = context._replace(query_energy=mean_over_tokens(shown, context.counted(shown)))
        return fitted.with_state(self._learn(x.to(torch.float32), context))

    def succeeding(
        self, state: Mapping[str, Tensor], first: Callable[[], Tensor], context: Context
    ) -> TrellisKeyCodec:
        """Return a codec with what one of other bits learnt; new blocks have new deviations."""
        if "order" not in state or state["deviation"].shape[1] == len(self.trellis.blocks):
            return self.restore(state)
        x = context.ordinary(first().to(torch.float32), self.group)
        weight, base = state["weight"].to(torch.float32), self.with_state(state)._first_key(x)
        energy = self._residual_energy(x, context.counted(x), base, weight)
        order = state["order"].to(torch.int64)
        return self.restore({**state, **self._channels(weight, order, energy)})

    @property
    def has_single(self) -> bool:
        """True if there is a codec of single tokens: slots have a flag of bases without means."""
        return self.trellis.first or not self.trellis.center

    def singly(self) -> TrellisKeyCodec:
        """Return a codec of single tokens in slots that this one reads, too: no base is a mean."""
        assert self.has_single
        other = self.with_state(self._state)
        other.group = 1
        other._store(replace(self.trellis, center=0))
        return other

    def _learn(self, x: Tensor, context: Context | None = None) -> dict[str, Tensor]:
        context = context or Context()
        whole = x.shape[2] // self.group * self.group
        x = x[:, :, : whole or None]
        heads, dim = x.shape[1], x.shape[3]
        counted = context.counted(x)
        state: dict[str, Tensor] = {}
        first = x.new_zeros(heads, dim)
        if self.trellis.first:
            state["first"] = first_key(x, context)
            first = state["first"].to(torch.float32)
        if whole:
            x = context.ordinary(x, self.group)
        if self.weighted or self.sorted:
            state |= self._learn_channels(x, counted, first, context.query_energy)
        return state

    def _learn_channels(
        self, x: Tensor, counted: Tensor, first: Tensor, query_energy: Tensor | None
    ) -> dict[str, Tensor]:
        heads, dim = x.shape[1], x.shape[3]
        ones = x.new_ones(heads, dim)
        energy_q = ones if query_energy is None else _floored(query_energy)
        energy_k = self._residual_energy(x, counted, first, ones)
        weight = ones
        if self.weighted:
            weight = square_root(square_root(energy_q / energy_k))
            # Their common factor is the scale's.
            size = square_root(divide(tree_sum(weight.square()), float(dim)))
            weight = half(weight / size, "weight of a channel").to(torch.float32)
            text = (
                "weight of a channel: zero in fp16, since keys are so much larger than queries; "
                "scale the input or keep this layer at 'none'"
            )
            require((weight > 0).all(), lambda: NonFiniteError(text))
            energy_k = self._residual_energy(x, counted, first, weight)
        order = torch.arange(dim, dtype=torch.int64, device=x.device).expand(heads, dim)
        if self.sorted:
            importance = energy_q * energy_k
            order = importance.sort(dim=-1, descending=True, stable=True).indices
        return self._channels(weight, order, energy_k)

    def _channels(self, weight: Tensor, order: Tensor, energy_k: Tensor) -> dict[str, Tensor]:
        """Return what is stored of weights and an order, and deviations of blocks by energies."""
        spread = (weight.square() * energy_k).gather(-1, order)
        deviation = [
            square_root(divide(tree_sum(part), float(part.shape[-1])))
            for part in torch.split(spread, self._vectors.widths, -1)
        ]
        deviations = torch.cat(deviation, -1)
        deviations = deviations / deviations.amin(-1, keepdim=True)
        return {
            "weight": weight.to(torch.float16),
            "order": order.to(torch.int16),
            "deviation": half(deviations, "deviation of a block"),
        }

    def _residual_energy(self, x: Tensor, counted: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        """Return the mean square of keys less their bases, `[H, D]`."""
        base, _, _ = self._bases.choose(x, first, weight, None)
        return _floored(mean_over_tokens((x - base).square(), counted))

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        super()._check_state(state)
        if "weight" in state:
            weight, order = state["weight"], state["order"]
            size = weight.to(torch.float32).square().mean(-1)
            self._check(bool((weight > 0).all() and (size < _MOST_WEIGHT).all()), "weight")
            self._check(bool((state["deviation"] >= 1).all()), "deviation")
            channels = torch.arange(self._dim, dtype=order.dtype, device=order.device)
            self._check(bool((order.sort(-1).values == channels).all()), "order")


def _floored(energy: Tensor) -> Tensor:
    """Add a share of the mean over channels, and hold energies of nothing at 1."""
    mean = divide(tree_sum(energy), float(energy.shape[-1]))
    return torch.where(mean > 0, energy + _FLOOR * mean, torch.ones_like(energy))
