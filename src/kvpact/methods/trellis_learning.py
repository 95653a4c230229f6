"""What `trellis` learns about keys: the first one, weights of channels, their order, deviations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.errors import NonFiniteError
from kvpact.methods.bases import first_key
from kvpact.methods.context import Context, mean_over_tokens
from kvpact.methods.fitted import Calibrating, KeysThatLearn
from kvpact.methods.trellis_codec import TrellisVectors
from kvpact.methods.trellis_keys import TreatedKeys
from kvpact.quantizers.checks import require
from kvpact.quantizers.numbers import half

_FLOOR = 0.001  # of the mean energy: added, so that no channel counts for nothing
_MOST_WEIGHT = 1.01  # mean square of the weights: 1, but for rounding


class TrellisKeyCodec(TreatedKeys, KeysThatLearn):
    """Keys with weights, sorted blocks or a first key, which are learnt."""

    encode, decode = KeysThatLearn.encode, KeysThatLearn.decode
    _encode, _decode = TreatedKeys.encode, TreatedKeys.decode

    def state_fields(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return what is learnt: first key, weights, order and deviations."""
        found = {"first": (self._dim, torch.float16)} if self._first else {}
        if self.weighted or self.sorted:
            found["weight"] = self._dim, torch.float16
            found["order"] = self._dim, torch.int16
            found["deviation"] = len(self.blocks), torch.float16
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
        if "order" not in state or state["deviation"].shape[1] == len(self.blocks):
            return self.restore(state)
        x = context.ordinary(first().to(torch.float32), self.group)
        weight, base = state["weight"].to(torch.float32), self.with_state(state)._first_key(x)
        energy = self._residual_energy(x, context.counted(x), base, weight)
        order = state["order"].to(torch.int64)
        return self.restore({**state, **self._channels(weight, order, energy)})

    @property
    def has_single(self) -> bool:
        """Whether there is a codec of single tokens: slots have a flag of bases without means."""
        return self._first or not self._center

    def singly(self) -> TrellisKeyCodec:
        """Return a codec of single tokens in slots that this one reads, too: no base is a mean."""
        assert self.has_single
        other = self.with_state(self._state)
        vectors, other._center, other.group = self._vectors, 0, 1
        seed = vectors.rotations[0].seed
        other._store(TrellisVectors(self.blocks, vectors.states, "token", seed), 0)
        return other

    def _learn(self, x: Tensor, context: Context | None = None) -> dict[str, Tensor]:
        context = context or Context()
        whole = x.shape[2] // self.group * self.group
        x = x[:, :, : whole or None]
        heads, dim = x.shape[1], x.shape[3]
        counted = context.counted(x)
        state: dict[str, Tensor] = {}
        first = x.new_zeros(heads, dim)
        if self._first:
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
            told = (
                "weight of a channel: zero in fp16, since keys are so much larger than queries; "
                "scale the input or keep this layer at 'none'"
            )
            require((weight > 0).all(), lambda: NonFiniteError(told))
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
            for part in torch.split(spread, [width for width, _ in self.blocks], -1)
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
