"""The model of a command: its dtype, its spec, its tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from kvpact.calibration import Calibration
from kvpact.cli.complete import DTYPES
from kvpact.cli.console import note
from kvpact.cli.inputs import InputError, require
from kvpact.evaluate import Candidate
from kvpact.recipe import load_recipe


def candidate_of(spec: str) -> Candidate:
    """Return a spec or recipe; a bad spec is told now, before a model is loaded."""
    candidate = Candidate(spec)
    if candidate.is_recipe:
        load_recipe(spec)
    else:
        candidate.layers(1)
    return candidate


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises
    ------
    InputError
        None of `DTYPES`.
    """
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not offered; take one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_models(names: list[str]) -> None:
    """Raise for the first model that is not there, before another one has run for minutes."""
    require("transformers", extra="transformers")
    from kvpact.integrations.models import check_model

    for name in names:
        check_model(name)


def open_model(name: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, saying so on stderr; torch may use so many CPU threads.

    Raises
    ------
    KVPactError
        transformers or the model's package is not installed, or the model can't be loaded; less
        than one thread.
    """
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads {threads} is not possible; take 1 or more")
        torch.set_num_threads(threads)
    torch_dtype = dtype_of(dtype)
    require("transformers", extra="transformers")
    from transformers.utils.logging import set_verbosity

    from kvpact.integrations.models import load_model

    set_verbosity(logging.ERROR)  # its advice is about options that these commands do not have
    note(f"loading model {name}")
    return load_model(name, dtype=torch_dtype)


def load_calibration(path: Path | None, network: Any) -> Calibration | None:
    """Return what a file holds, and say so if it was made of another model."""
    if path is None:
        return None
    from kvpact.integrations.fingerprint import model_fingerprint

    found = Calibration.load(path)
    if found.model and found.model != model_fingerprint(network):
        note(f"{path} was made of another model, or of this one in another dtype")
    return found


def check_positions(model: Any, tokens: int, new: int = 0) -> None:
    """Raise `InputError` unless there are tokens, and the model has positions for them all."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if tokens == 0 or (limit is not None and tokens + new > limit):
        more = f" and {new} new ones" if new else ""
        hint = "; shorten the prompt or lower --max-new-tokens" if new else ""
        raise InputError(f"{tokens} tokens{more} do not fit the model's {limit} positions{hint}")


def continued(model: Any, ids: torch.Tensor, cache: Any, new: int, **options: Any) -> torch.Tensor:
    """Let a model continue a text, ``[1, T]``, greedily unless options of its ``generate`` differ.

    Tokens that the cache holds already are not computed again.
    """
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ids = ids.to(model.device)
    options = {**greedy, "past_key_values": cache, "max_new_tokens": new, **options}
    tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tokens


def encode(tokenizer: Any, text: str, *, chat: bool = False) -> torch.Tensor:
    """Return the token ids ``[1, T]`` of a text.

    Raises
    ------
    InputError
        The chat template was asked for and the tokenizer has none.
    """
    if chat and not tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template; leave --chat out")
    if chat:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: torch.Tensor = inputs["input_ids"]
    return ids
