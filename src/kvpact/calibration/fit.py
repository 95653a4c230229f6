"""Learning what methods learn of one layer, from tokens that a model computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvpact.calibration.base import LayerCalibration, State
from kvpact.errors import SpecError
from kvpact.key_rotation import KeyRotation
from kvpact.methods.fitted import Calibrating, FittedCodec
from kvpact.spec import Spec


class LayerTokens(NamedTuple):
    """Calibration tokens of one layer, rows of equal length, from position 0 on.

    - `k`, `v`: `[B, H_kv, T, D]` and `[B, H_kv, T, D_v]`, as a cache is given them.
    - `query_energy`: `[B, H_kv, T, D]` fp32: mean square of the queries over the query heads of
      each KV head.
    - `output_energy`: `[H_kv, D_v]`: squares of what the output projection makes of each channel of
      V, summed.
    - `rotation`: what turned the keys by their positions.
    - `less_offset`: keys without their offset, where there is one: methods learn from these, but
      for those that store keys as they are before RoPE, with their bias.
    """

    k: Tensor
    v: Tensor
    query_energy: Tensor
    output_energy: Tensor | None = None
    rotation: KeyRotation | None = None
    less_offset: Tensor | None = None

    def keys_for(self, codec: FittedCodec) -> Tensor:
        """Return the keys as a cache gives them to a codec, but for the rotation."""
        if self.less_offset is None or (codec.before_rope and self.rotation is not None):
            return self.k
        return self.less_offset


def calibrate_layer(tokens: LayerTokens, specs: Sequence[Spec]) -> LayerCalibration:
    """Return what the methods of specs learn of a layer.

    `tokens`: of the layer. `specs`: methods that learn nothing are left out.

    Raises `SpecError` (no method of the specs learns); `GeometryError`, `NonFiniteError` (tokens of
    the wrong shape, or with NaN or infinity).
    """
    k: dict[str, State] = {}
    v: dict[str, State] = {}
    for spec in specs:
        for side, method, x in ((k, spec.key, tokens.k), (v, spec.value, tokens.v)):
            make = method.key_codec if side is k else method.value_codec
            codec = make(x.shape[3], x.dtype)
            if not isinstance(codec, FittedCodec):
                continue
            known = Calibrating(
                tokens.v, tokens.query_energy, tokens.output_energy, tokens.rotation, method.sinks
            )
            x = tokens.keys_for(codec) if side is k else x
            side[method.learnt_name()] = codec.calibrated(x, known).state()
    if not k and not v:
        names = ", ".join(map(str, specs))
        raise SpecError(f"none of these methods learns from tokens: {names}")
    return LayerCalibration(tokens.k.shape[1], tokens.k.shape[3], tokens.v.shape[3], k, v)
