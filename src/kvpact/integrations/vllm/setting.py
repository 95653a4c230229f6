"""The one setting of the plug-in: a spec or the path of a recipe, in an environment variable."""

from __future__ import annotations

import os
from typing import NoReturn

import torch

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.kernels import Compute, Plan, choose
from kvpact.methods import Codec
from kvpact.recipe import layer_specs
from kvpact.spec import Spec

SETTING = "KVPACT_VLLM_SPEC"
_CPU = torch.device("cpu")


def served() -> str | None:
    """Return what the variable holds, a spec or the path of a recipe; None where it is not set."""
    return os.environ.get(SETTING, "").strip() or None


def served_specs(num_layers: int) -> list[Spec]:
    """Return the spec that the pages of each layer of the model are to hold. Raises `SpecError`."""
    text = served()
    if text is None:
        raise SpecError(f"{SETTING} is not set: name a spec or a recipe")
    specs = layer_specs(text, num_layers)
    for spec in dict.fromkeys(specs):
        check_serves(spec)
    return specs


def check_serves(spec: Spec, setting: str = SETTING) -> None:
    """Raise `SpecError` where a spec's tokens can't all lie in pages that sequences share."""
    for side, codec in zip("KV", codecs(spec, 64, 64, torch.float32), strict=True):
        reason = ""
        if codec.learns_from or not codec.ready:
            reason = "learns from its tokens"
        elif codec.joint or codec.rotation is not None or codec.has_bias:
            reason = "stores more than slots of one head"
        elif codec.group > 1:
            reason = f"packs {codec.group} tokens together"
        if reason:
            raise SpecError(
                f"{setting}={str(spec)!r}: the method of {side} {reason}, which vLLM's pages can't "
                "hold; take 'turboquant', 'int', 'fp8', 'none' or "
                "'trellis:center=0,first=false,weights=false,blocks=false', with sinks=0"
            )
    if spec.key.sinks or spec.value.sinks:
        raise SpecError(
            f"{setting}={str(spec)!r}: vLLM's pages have no place for exact sinks; write "
            f"{str(spec.with_options(sinks=0))!r}"
        )
    if spec.key.window != spec.value.window:
        raise SpecError(
            f"{setting}={str(spec)!r}: K and V need windows of equal width; write "
            f"{str(spec.with_options(window=spec.key.window))!r}"
        )


def codecs(spec: Spec, dim: int, v_dim: int, dtype: torch.dtype) -> tuple[Codec, Codec]:
    """Return the codecs for keys and values `dim` and `v_dim` wide."""
    return spec.key.key_codec(dim, dtype), spec.value.value_codec(v_dim, dtype)


def native_plan(
    k: Codec, v: Codec, dtype: torch.dtype, device: torch.device = _CPU, latent: bool = False
) -> Plan:
    """Return who computes on a device: the kernels made for it; on a GPU checks are deferred."""
    on_cpu = device.type == "cpu"
    compute: Compute = choose("cpu") if on_cpu else choose("triton", check="deferred")
    return compute.plan(
        compute.stream(k, device, dtype), compute.stream(v, device, dtype), latent=latent
    )


def refuse(what: str) -> NoReturn:
    """Raise `BackendUnavailable` for a model, or a way of running it, that is not covered."""
    raise BackendUnavailable(
        f"kvpact's vLLM plug-in does not cover {what}; unset {SETTING} to run with vLLM's own cache"
    )
