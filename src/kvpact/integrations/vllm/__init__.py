"""vLLM: a plug-in whose pages hold kvpact's packed slots.

vLLM finds `register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes. It does nothing unless the environment variable ``KVPACT_VLLM_SPEC`` names a spec.
Nothing of vLLM is imported before that, and nothing of it is replaced but the attention backend
that vLLM's own registry lets a plug-in replace.
"""

from __future__ import annotations

from kvpact.integrations.vllm.setting import SETTING, served_spec

__all__ = ["SETTING", "register", "served_spec"]


def register() -> None:
    """Make vLLM's CPU attention that of kvpact, where ``KVPACT_VLLM_SPEC`` is set.

    Raises
    ------
    SpecError
        The variable is no spec, or one whose slots can't lie in vLLM's pages.
    """
    if served_spec() is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum
    register_backend(backend.CPU_ATTN, f"{__name__}.backend.KVPactBackend")
    for latent in (backend.CPU_MLA, backend.AMX_MLA):
        register_backend(latent, f"{__name__}.refused.LatentBackend")
