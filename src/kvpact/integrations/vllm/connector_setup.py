"""Settings of the connector from vLLM's configuration: form of pages, models, adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvpact.errors import BackendUnavailable, MismatchError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import NOTHING, learnt_of
from kvpact.integrations.fingerprint import files_fingerprint, model_folder
from kvpact.integrations.pages.page import check_serves
from kvpact.integrations.vllm.calibrated import known_of
from kvpact.integrations.vllm.connector_form import StoredForm
from kvpact.integrations.vllm.dtype import TAKEN
from kvpact.integrations.vllm.setting import (
    SETTING,
    layer_number,
    served,
    served_specs,
    specs_of,
)
from kvpact.spec import Spec, parse_spec


def _refuse(what: str) -> NoReturn:
    raise BackendUnavailable(f"kvpact's connector does not cover {what}")


def form_of(config: Any, kv_cache_config: Any, storage: str | None) -> StoredForm:
    """Return the form of a rank's pages. Raises `BackendUnavailable`, `SpecError`."""
    parallel, groups = config.parallel_config, kv_cache_config.kv_cache_groups
    policy = config.kv_transfer_config.kv_load_failure_policy
    for there, what in (
        (len(groups) != 1, "models with several kinds of layers"),
        (config.speculative_config is not None, "speculative decoding"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.decode_context_parallel_size > 1, "context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism"),
        (policy != "recompute", 'kv_load_failure_policy "fail", since stores forget: "recompute"'),
        (config.cache_config.cache_dtype not in TAKEN, "--kv-cache-dtype"),
    ):
        if there:
            _refuse(what)
    pages, names = groups[0].kv_cache_spec, groups[0].layer_names
    layers = tuple(sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))
    if isinstance(pages, UniformTypeKVCacheSpecs):  # as many tokens, of unlike bytes
        if any(each.sliding_window is not None for each in pages.kv_cache_specs.values()):
            _refuse("models with several kinds of layers")
        pages = pages.kv_cache_specs[layers[0]]
    if type(pages) is not FullAttentionSpec:
        _refuse(f"layers of {type(pages).__name__}")
    geometry = CacheGeometry(
        len(layers),
        pages.num_kv_heads,
        pages.head_size,
        pages.head_size_v,
        config.model_config.dtype,
    )
    ranks = parallel.tensor_parallel_size
    total = config.model_config.get_total_num_hidden_layers()
    specs = _specs(storage, layers, total)
    learnt = (NOTHING,) * len(layers)
    known = None if storage is not None else known_of(config.model_config, served_specs(total))
    if known is not None:
        numbers = [layer_number(name, total) for name in layers]
        heads = config.model_config.get_total_num_kv_heads()
        whole = replace(geometry, num_kv_heads=heads)
        learnt = tuple(learnt_of(known, numbers, specs, whole, total))
    place = pages.block_size, parallel.rank % ranks, ranks
    return StoredForm(layers, specs, geometry, *place, learnt)


def _specs(storage: str | None, layers: Sequence[str], total: int) -> tuple[Spec, ...]:
    """Return the spec by which each layer's tokens are stored."""
    given = served() is not None
    if storage is None and given:
        return specs_of(layers, served_specs(total))
    if storage is None or given:
        raise SpecError(
            f"chunks have the slots of kvpact's pages ({SETTING}), or vLLM's own tokens as "
            "kv_connector_extra_config's storage says: set one of the two"
        )
    spec = parse_spec(storage)
    check_serves(spec, "storage")
    return (spec,) * len(layers)


def model_fingerprint(config: Any) -> str:
    """Return a fingerprint of a model's config, dtype and weights. Raises `MismatchError`."""
    model = config.model_config
    shown: dict[str, Any] = {
        "config": model.hf_config.to_dict(),
        "quantization": model.quantization,
        "dtype": str(model.dtype),
    }
    if any(kind in json.dumps(shown, default=str) for kind in ("longrope", "dynamic")):
        shown["longest"] = model.max_model_len  # such RoPE may depend on it
    return files_fingerprint(_folder(model.model, model.revision), shown)


def _folder(name: str, revision: str | None) -> Path:
    """Return where a model's files lie on this machine."""
    folder = model_folder(name, revision)
    if folder is None:
        raise MismatchError(
            f"the files of {name} are not on this machine, so they have no fingerprint; name the "
            "model: kv_connector_extra_config's model"
        )
    return folder


def adapter_fingerprint(request: Any) -> str | None:
    """Return the fingerprint of a request's adapter; None where it has none."""
    lora = request.lora_request
    return None if lora is None else _adapter(lora.lora_int_id, lora.lora_path)


@cache
def _adapter(number: int, path: str) -> str:
    folder = _folder(path, None)
    return files_fingerprint(folder, json.loads((folder / "adapter_config.json").read_text()))
