"""The shape of a KV cache: what every method and layout has to agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpact.callable_package import tells_names
from kvpact.errors import GeometryError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE = 1 << 20
"""Largest number of layers or heads, and largest width."""


_ALIKE = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text"),
    *("glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
    *("stablelm", "starcoder2"),
)
"""Types of models all of whose layers hold K and V of one shape, which their configs tell."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`. Raises `GeometryError`."""
    if name not in DTYPES:
        raise GeometryError(f"dtype {name!r} is not offered; take one of {', '.join(DTYPES)}")
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise `GeometryError` unless a value is a whole number from `least` on, of 64 bits."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or not least <= value < 1 << 63:  # type: ignore[operator]
        raise GeometryError(f"{name} should be a whole number from {least} on, not {value!r}")


@tells_names({}, "CacheGeometry(num_layers, num_kv_heads, head_dim), or .from_config(model.config)")
@dataclass(frozen=True)
class CacheGeometry:
    """Shape of the keys and values that one model caches.

    Parameters
    ----------
    num_layers : int
        Layers that hold K and V.
    num_kv_heads : int
        KV heads per layer (fewer than query heads in grouped-query attention).
    head_dim : int
        Width of one key vector, any positive number; 0 where no keys are held, because they can be
        made of the values (K = V): see `Step.attend_made`.
    v_head_dim : int, optional
        Width of one value vector; `head_dim` if omitted.
    dtype : torch.dtype, optional
        Dtype of K and V. If omitted, a cache takes the dtype of the first keys that it sees.
    latent : bool
        Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1): one joint
        latent `c_kv` stands in K's place and one shared rotated key `k_rope` in V's; see `mla`.

    Raises
    ------
    GeometryError
        A number is not a positive integer or above `MAX_SIZE`, the dtype is not a
        floating-point dtype, or latents have more than one head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            least = 0 if name == "head_dim" and self.v_head_dim else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GeometryError(f"{name} must be a positive integer, not {value!r}")
            if value > MAX_SIZE:
                raise GeometryError(f"{name} = {value} is too large; {MAX_SIZE:,} is the most")
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", dtype_of(self.dtype))  # type: ignore[unreachable]
        if not getattr(self.dtype, "is_floating_point", self.dtype is None):
            raise GeometryError(f"dtype must be a floating-point dtype, not {self.dtype}")
        if self.latent and not self.head_dim:
            raise GeometryError("latents have a width")
        if self.latent and self.num_kv_heads != 1:
            raise GeometryError(
                f"latents have one head, shared by all query heads, not {self.num_kv_heads}"
            )

    @classmethod
    def mla(
        cls, num_layers: int, latent_dim: int, rope_dim: int, dtype: torch.dtype | None = None
    ) -> CacheGeometry:
        """Return the geometry of a cache of MLA latents.

        Parameters
        ----------
        num_layers, dtype
            As of `CacheGeometry`.
        latent_dim, rope_dim : int
            Widths of the joint latent `c_kv` and of the shared rotated key `k_rope` (512 and 64 in
            DeepSeek-V3).
        """
        return cls(num_layers, 1, latent_dim, rope_dim, dtype, latent=True)

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype | None = None) -> CacheGeometry:
        """Return the geometry of a model's config or ``config.json``. Raises `GeometryError`."""
        fields = config
        if not isinstance(config, Mapping):
            if not hasattr(config, "get_text_config"):
                line = "CacheGeometry.from_config(model.config)"
                raise GeometryError(f"{type(config).__name__} is no config; write: {line}")
            found = config.get_text_config(decoder=True)
            fields = {**vars(found), "model_type": found.model_type}
        fields = fields.get("text_config", fields)
        kind, layers = fields.get("model_type"), fields.get("num_hidden_layers")
        heads = fields.get("num_attention_heads")
        width = fields.get("head_dim") or (heads and fields.get("hidden_size", 0) // heads)
        if kind not in _ALIKE or not layers or not width:
            raise GeometryError(
                f"a config of type {kind!r} tells no shape of K and V: write CacheGeometry("
                "num_layers, num_kv_heads, head_dim) for the layers that hold such K and V"
            )
        if fields.get("kv_lora_rank"):
            return cls.mla(layers, fields["kv_lora_rank"], fields["qk_rope_head_dim"], dtype)
        kv_heads = fields.get("num_key_value_heads") or heads
        return cls(layers, kv_heads, width, fields.get("v_head_dim"), dtype)

    @property
    def value_dim(self) -> int:
        """Width of one value vector."""
        assert self.v_head_dim is not None
        return self.v_head_dim

    @property
    def query_dim(self) -> int:
        """Width of one query vector; over latents that of `c_kv` and `k_rope` together."""
        return self.head_dim + self.value_dim if self.latent else self.head_dim
