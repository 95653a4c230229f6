"""Caches of MLA latents, `c_kv` in K's place and `k_rope`, which needs 8 bits, in V's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpact.cache.batch.contiguous import ContiguousCache
from kvpact.cache.stream.codecs import Calibration, latent_spec
from kvpact.contract import AttendConfig, attend_config
from kvpact.errors import DeviceError, DtypeError, GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.kernels import absorb_query, choose, expand_output
from kvpact.recipe import SpecLike, layer_specs


class MLACache(ContiguousCache):
    """A `CompressedKVCache` of MLA latents, attended to without expanding them.

    In every method `k` is the latent `c_kv` `[B, 1, T, r]` and `v` the rotated key `k_rope`
    `[B, 1, T, d_rope]`; queries are absorbed ones `[B, H, S, r + d_rope]`
    (`kvpact.kernels.absorb_query`) and outputs latent `[B, H, S, r]` (`expand_output`);
    `attend_heads` does all three steps. `config.softmax_scale` is needed wherever there are
    queries. A `DequantResult` has `[c_kv, k_rope]` as K and `c_kv` as V.

    Parameters
    ----------
    spec : str, Spec, path or mapping
        The method for `c_kv`; a recipe may name one per layer.
    num_layers : int
        Layers of the model.
    latent_dim, rope_dim : int
        Widths r of `c_kv` and d_rope of `k_rope`.
    rope : str, optional
        The method for `k_rope`: 8-bit integers with the spec's sinks and window if omitted (exact
        with ``none``). It may also stand in the spec, after a slash.
    dtype : torch.dtype, optional
        Dtype of the latents; that of the first ones if omitted.
    max_tokens : int, optional
        Tokens per layer after which `CacheFull` is raised.
    backend, calibration
        As in `create_cache`.

    Raises
    ------
    SpecError
        A spec can't be read, or both the spec and `rope` name a method for `k_rope`.
    GeometryError
        A number is not a positive integer.

    Notes
    -----
    `create_cache` and `PagedKVCache` make such caches of any layout from `CacheGeometry.mla`.
    """

    def __init__(
        self,
        spec: SpecLike,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        *,
        rope: str | None = None,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        backend: str = "auto",
        calibration: Calibration | None = None,
    ) -> None:
        geometry = CacheGeometry.mla(num_layers, latent_dim, rope_dim, dtype)
        compute = choose(backend)
        specs = [latent_spec(each, rope) for each in layer_specs(spec, num_layers)]
        super().__init__(specs, geometry, max_tokens, calibration, compute)

    def attend_heads(
        self,
        layer: int,
        *,
        c_kv: Tensor,
        k_rope: Tensor,
        q_nope: Tensor,
        q_rope: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        config: AttendConfig | None = None,
    ) -> Tensor:
        """Store new latents and return the heads' outputs, the projections absorbed.

        Parameters
        ----------
        layer : int
            Layer index.
        c_kv, k_rope : Tensor
            `[B, 1, S, r]` and `[B, 1, S, d_rope]`, the new tokens.
        q_nope, q_rope : Tensor
            `[B, H, S, d_nope]` and `[B, H, S, d_rope]`.
        w_uk, w_uv : Tensor
            `[H, d_nope, r]` and `[H, d_v, r]`.
        config : AttendConfig, optional
            The scale is `(d_nope + d_rope) ** -0.5` if it names none.

        Returns
        -------
        Tensor
            `[B, H, S, d_v]`. Errors are those of `attend`.
        """
        config = attend_config(config)
        self._check_heads(q_nope, q_rope, w_uk, w_uv)
        if config.softmax_scale is None:
            width = q_nope.shape[-1] + q_rope.shape[-1]
            config = replace(config, softmax_scale=width**-0.5)
        query = absorb_query(q_nope, q_rope, w_uk)
        return expand_output(self.attend(layer, k=c_kv, v=k_rope, q=query, config=config), w_uv)

    def _check_heads(self, q_nope: Tensor, q_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> None:
        """Raise before anything is stored what the projections would raise after it."""
        given = {"q_nope": q_nope, "q_rope": q_rope, "w_uk": w_uk, "w_uv": w_uv}
        for name, x in given.items():
            if not isinstance(x, Tensor):
                raise DtypeError(f"{name} should be a torch tensor, not {type(x).__name__}")
            if x.dim() != (4 if name.startswith("q") else 3):
                raise GeometryError(f"{name} has shape {tuple(x.shape)}")
            if x.dtype != q_nope.dtype:
                raise DtypeError(f"{name} is {x.dtype}, q_nope {q_nope.dtype}; cast one of them")
            if x.device != q_nope.device:
                raise DeviceError(f"{name} is on {x.device}, q_nope on {q_nope.device}; move it")
        heads, rank, rope = q_nope.shape[1], self.geometry.head_dim, self.geometry.value_dim
        wanted = {
            "q_rope": (*q_nope.shape[:3], rope),
            "w_uk": (heads, q_nope.shape[3], rank),
            "w_uv": (heads, w_uv.shape[1], rank),
        }
        for name, shape in wanted.items():
            if given[name].shape != shape:
                raise GeometryError(
                    f"{name} has shape {tuple(given[name].shape)}; it should be {shape}"
                )
