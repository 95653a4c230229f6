"""vLLM: a plug-in whose pages hold kvpact's packed slots.

vLLM finds `register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes. Unless the environment variable ``KVPACT_VLLM_SPEC`` names a spec or a recipe, or
``default``, it adds a choice to ``--kv-cache-dtype`` and imports nothing of vLLM. Nothing of it is
replaced but what reads that option, and the attention backend, which vLLM's registry provides for.
"""

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.calibrations import learning
from kvpact.integrations.vllm.calibrated import CALIBRATION, calibration_file
from kvpact.integrations.vllm.dtype import register_dtype
from kvpact.integrations.vllm.needs import NEEDS, ON_CPU, check_needs, require
from kvpact.integrations.vllm.option import offer
from kvpact.integrations.vllm.setting import DEFAULT, SETTING, refuse, served, served_specs
from kvpact.recipe import is_recipe

__all__ = ["CALIBRATION", "SETTING", "register", "served_specs"]


_ON_CUDA = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "TRITON_FLASH_ATTN",
    "TRITON_FLASHINFER",
    "TURBOQUANT",
)
"""Backends that vLLM may choose for a decoder on a CUDA device; all others are refused."""


def register() -> None:
    """Replace vLLM's attention by kvpact's where ``KVPACT_VLLM_SPEC`` is set, or the option is."""
    offered, text = offer(register), served()
    if text is None:
        if calibration_file() is not None and not offered:
            raise SpecError(f"{CALIBRATION} is set, and {SETTING} is not: set it to {DEFAULT!r}")
        return
    specs = [] if is_recipe(text) else served_specs(1)
    check_needs(NEEDS)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        taken = {"CPU_ATTN": "backend.KVPactBackend", "AMX_MLA": "latents.LatentBackend"}
    elif current_platform.is_cuda():
        if learning(specs):
            refuse("specs that learn from a model on a GPU: take 'turboquant:bits=4,sinks=0'")
        taken = dict.fromkeys(_ON_CUDA, "cuda.CudaBackend")
    else:
        raise BackendUnavailable(
            f"vLLM runs on {current_platform.device_name or 'an unknown device'}, kvpact's plug-in "
            f"on CPUs and CUDA devices; unset {SETTING} to run with vLLM's own cache"
        )
    if on_cpu:
        check_needs(ON_CPU)
    places = AttentionBackendEnum.__members__
    require([f"AttentionBackendEnum.{name}" for name in taken if name not in places])
    for name, member in places.items():
        if name in taken:
            register_backend(member, f"{__name__}.{taken[name]}")
        elif "MLA" in name:
            register_backend(member, f"{__name__}.latents.OtherLatentBackend")
        elif member.value and name != "NO_ATTENTION" and not on_cpu:
            register_backend(member, f"{__name__}.cuda.OtherBackend")
    register_dtype()
