"""Fingerprints of models, made of all that they compute with, never of file names or times."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import MismatchError
from kvpact.integrations.weights import brought, gathers, modules_to, pieces

_LEFT_OUT = ("_name_or_path", "transformers_version", "_attn_implementation", "dtype")
"""Keys of a config that say where a model came from, or how it is run."""

_ADAPTER = ("_active_adapter", "merged_adapters", "_disable_adapters", "scaling")
"""Attributes of PEFT's layers: which adapters are active or merged, and how strongly."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def fingerprint(weights: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return a BLAKE2b-256 over a config and all weights by name; `MismatchError` if unreadable."""
    return _digest(
        chain.from_iterable(pieces(x, weights[x], False) for x in sorted(weights)), config
    )


def _digest(weights: Iterable[tuple[str, Tensor | str]], config: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(digest_size=32)

    def add(data: bytes | memoryview) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    known = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    add(json.dumps(known, sort_keys=True, default=str).encode())
    for name, x in weights:
        if isinstance(x, str):
            add(name.encode())
            add(x.encode())
            continue
        tensor = x.cpu().contiguous()
        for text in (name, str(tensor.dtype), str(tuple(tensor.shape))):
            add(text.encode())
        add(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def files_fingerprint(folder: str | PathLike[str], config: Mapping[str, Any]) -> str:
    """Return a BLAKE2b-256 over a config and a folder's files of weights, or all if none are."""
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    weights = [path for path in files if path.suffix in _WEIGHTS] or files
    if not weights:
        raise MismatchError(f"{folder} holds no weights that a fingerprint could be made of")
    known = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    for path in weights:
        with path.open("rb") as file:
            part = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        digest.update(json.dumps([path.name, part.hexdigest()]).encode())
    return digest.hexdigest()


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """Return where a model's files lie on this machine; None where they don't."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # whatever a hub's client raises
        return None


def has_adapters(model: Any) -> bool:
    """Return whether a model has adapters (PEFT) that are not merged into its weights."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        return True
    return any(hasattr(module, "_active_adapter") for module in model.modules())


def require_adapter_name(model: Any, adapter: str | None) -> None:
    """Raise `MismatchError` if a model has adapters and `adapter` does not say which is active."""
    if not adapter and has_adapters(model):
        raise MismatchError(
            "the model has adapters, and which one is active, and how strongly, is not in its "
            "weights: say it with adapter=, a name per adapter and scaling, or merge the adapter"
        )


def weights_seen(model: Any) -> tuple[object, object]:
    """Return marks that change with weights and with the active adapter; cheap to read."""
    tensors, adapters = list[object](), list[object]()
    numbers: dict[torch.device, list[Tensor]] = defaultdict(list)
    gathered = gathers(model)
    for module in model.modules():
        own = vars(module)
        adapters += [repr(own[name]) for name in _ADAPTER if own.get(name)]
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            if x is None or name in module._non_persistent_buffers_set:
                continue
            version = 0 if x.is_inference() else x._version
            if x.is_meta or gathered:  # offloaded, or in parts: others stand there after each call
                tensors.append((name, 0, 0))
                continue
            if type(x) not in (Tensor, torch.nn.Parameter) or not x.numel():
                tensors.append((name, id(x), version))
                continue
            tensors.append((name, x.data_ptr(), version))
            numbers[x.device].append(x.detach()[(-1,) * x.dim()].to(torch.float64))
    held = [torch.stack(each).cpu().numpy().tobytes() for each in numbers.values()]
    return (tensors, held), adapters


def model_fingerprint(
    model: Any, *, adapter: str | None = None, config: Mapping[str, Any] | None = None
) -> str:
    """Return the `fingerprint` of a transformers model as it is loaded.

    `adapter`: a name for what is active now, needed where there are adapters that are not merged;
    `config`: in place of the model's. Weights that are offloaded are brought one by one; of a model
    whose heads are on several processes (tensor parallelism) each has its own fingerprint. Raises
    `MismatchError` where weights can't be read.
    """
    require_adapter_name(model, adapter)
    known = dict(model.config.to_dict() if config is None else config)
    if has_adapters(model):
        known["kvpact_adapter"] = adapter
    return _digest(_state(model), known)


def _state(model: Any) -> Iterator[tuple[str, Tensor | str]]:
    """Yield the plain tensors of a model's state, in the order of their names."""
    gather, state = gathers(model), model.state_dict(keep_vars=True)
    for name in sorted(state):
        x, modules = state[name], modules_to(model, name)
        with brought(x, *modules):
            if isinstance(x, Tensor) and x.is_meta:
                x = getattr(modules[0], name.rpartition(".")[2], x)
            yield from pieces(name, x, gather)
