"""What the checks of fitted methods share: codecs that learnt from calibration tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvpact.geometry import CacheGeometry
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import parse_spec
from kvpact.testing.data import random_tokens

State = dict[str, Tensor]

_STATES: dict[tuple[Any, ...], State] = {}


class FittedKit:
    """Codecs that are fitted; fitting takes time, so each state is kept for the test process.

    Attributes
    ----------
    calibration_tokens : int
        Tokens per row that codecs learn from, in two rows.
    """

    spec: ClassVar[str]
    calibration_tokens: ClassVar[int] = 512

    def unfitted(self, side: str, dim: int, dtype: torch.dtype = torch.float32) -> FittedCodec:
        """Return a new codec for K (``key``) or V (``value``) that has learnt nothing."""
        spec = parse_spec(self.spec)
        make = spec.key.key_codec if side == "key" else spec.value.value_codec
        codec = make(dim, dtype)
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
        """Return a fitted codec whose state is nobody else's memory."""
        codec = self.unfitted(side, dim, dtype)
        key = (self.spec, self.calibration_tokens, side, dim, dtype, heads, offset)
        if key not in _STATES:
            tokens = self.calibration_data(side, heads, dim, offset).to(dtype)
            _STATES[key] = codec.fit(tokens).state()
        return codec.restore({name: tensor.clone() for name, tensor in _STATES[key].items()})

    def calibration(self, geometry: CacheGeometry) -> dict[int, tuple[State, State]]:
        """Return what the codecs of every layer learnt, for `create_cache`."""
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
        spec = parse_spec(self.spec)
        make = spec.key.key_codec if side == "key" else spec.value.value_codec
        # One side may be a method that learns nothing.
        if not isinstance(make(dim, dtype), FittedCodec):
            return {}
        return self.fitted(side, dim, dtype, heads, offset).state()
