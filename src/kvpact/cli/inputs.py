"""What commands are given: texts, a spec, a model, threads."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvpact.calibration import Calibration
from kvpact.cli.console import note
from kvpact.errors import BackendUnavailable, KVPactError
from kvpact.evaluate import Candidate
from kvpact.recipe import load_recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InputError(KVPactError, ValueError):
    """A command was given something it can't use."""


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or of stdin for ``-``.

    Raises
    ------
    InputError
        No such file, a folder, no permission, not UTF-8, or nothing but white space in it.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text; convert it first") from error
    if not text.strip():
        raise InputError(f"{path} holds no text; give a text file")
    return text


def prompt_text(file: Path | None, prompt: str | None, purpose: str) -> str:
    """Return the text of a file and a prompt, a blank line between them.

    Raises
    ------
    InputError
        There is neither, or the file can't be read.
    """
    parts = [read_text(file)] if file is not None else []
    parts += [prompt] if prompt else []
    if not parts:
        raise InputError(f"nothing to {purpose}; give a prompt or --file")
    return "\n\n".join(parts)


def candidate_of(spec: str) -> Candidate:
    """Return a spec or recipe; a bad spec is told now, before a model is loaded."""
    candidate = Candidate(spec)
    if candidate.is_recipe:
        load_recipe(spec)
    else:
        candidate.layers(1)
    return candidate


@contextmanager
def results_folder(path: Path | None) -> Iterator[None]:
    """Make a folder for results before the work starts; remove it again if the work fails.

    Parameters
    ----------
    path : Path or None
        The folder; folders that existed, or hold files, stay. None makes nothing.

    Raises
    ------
    InputError
        It can't be made or written to.
    """
    if path is None:
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{path} can't be made: {error.strerror}; give another --out"
            ) from error
        if not os.access(path, os.W_OK):
            raise InputError(f"{path} can't be written to; give another --out")
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`.

    Raises
    ------
    InputError
        None of `DTYPES`.
    """
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not offered; take one of {', '.join(DTYPES)}")
    return DTYPES[name]


def require(*packages: str, extra: str) -> None:
    """Raise `BackendUnavailable` with the pip command where a package of an extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"{' and '.join(missing)} not installed; pip install 'kvpact[{extra}]'"
        )


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
