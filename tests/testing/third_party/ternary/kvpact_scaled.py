"""Ternary codes of channels over their root mean square, which is learnt; and broken ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from kvpact_ternary import TernaryCodec

from kvpact.formats import CodesField, TokenField
from kvpact.methods.fitted import FittedCodec, FittedMethod


class ScaledCodec(FittedCodec):
    """One stream."""

    def __init__(self, dim, order):
        super().__init__(dim)
        self.inner = TernaryCodec(dim, order)
        self.fields = (CodesField("codes", 2, dim, order), TokenField("scale", 1))

    def _learn(self, x):
        energy = x.double().square()
        # One more token of equal channels: few tokens say little of a channel.
        energy = (energy.sum((0, 1, 2)) + energy.mean()) / (energy[..., 0].numel() + 1)
        return {"sigma": energy.sqrt().clamp(1e-6, 1e30).float()}

    def _check_state(self, state):
        self._check(set(state) == {"sigma"}, ", ".join(sorted(state)))
        sigma = state["sigma"]
        self._check(sigma.shape == (self._dim,) and bool((sigma > 0).all()), "sigma")

    def _encode(self, x):
        return self.inner.encode(x / self._state["sigma"])

    def _decode(self, arrays):
        return self.inner.decode(arrays) * self._state["sigma"]


class RelearningCodec(ScaledCodec):
    """Learns anew from each call's tokens: what is stored no longer reads as it was written."""

    def encode(self, x, frozen=None):
        self._set(self._learn(x))
        return self._encode(x)


class InPlaceCodec(ScaledCodec):
    """Fits itself, and with it every cache that holds it."""

    def fit(self, x):
        self._state = dict(super().fit(x)._state)
        return self


class SecretCodec(ScaledCodec):
    """Keeps half of what it learnt where nothing counts or restores it."""

    def _learn(self, x):
        self.shift = x.mean((0, 1, 2)).clamp(-1e4, 1e4)
        return super()._learn(x)

    def _set(self, state):
        super()._set(state)
        self.shift = getattr(self, "shift", torch.zeros(self._dim)) + 0


class TrustingCodec(ScaledCodec):
    """Takes any state."""

    def _check_state(self, state):
        pass


@dataclass(frozen=True, kw_only=True)
class Scaled(FittedMethod):
    name: ClassVar[str] = "scaled"
    codec: ClassVar[type] = ScaledCodec

    def key_codec(self, dim, dtype):
        """For keys."""
        return self.codec(dim, "token")

    def value_codec(self, dim, dtype):
        """For values."""
        return self.codec(dim, "channel")


@dataclass(frozen=True, kw_only=True)
class Relearning(Scaled):
    name: ClassVar[str] = "scaled_relearning"
    codec: ClassVar[type] = RelearningCodec


@dataclass(frozen=True, kw_only=True)
class InPlace(Scaled):
    name: ClassVar[str] = "scaled_in_place"
    codec: ClassVar[type] = InPlaceCodec


@dataclass(frozen=True, kw_only=True)
class Secret(Scaled):
    name: ClassVar[str] = "scaled_secret"
    codec: ClassVar[type] = SecretCodec


@dataclass(frozen=True, kw_only=True)
class Trusting(Scaled):
    name: ClassVar[str] = "scaled_trusting"
    codec: ClassVar[type] = TrustingCodec
