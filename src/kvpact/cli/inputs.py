"""Inputs of commands: texts, models, specs, folders for results; torch is imported late."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.cli.console import note
from kvpact.data import book_path, model_table
from kvpact.errors import BackendUnavailable, KVPactError
from kvpact.files import is_of_others
from kvpact.geometry import dtype_of
from kvpact.recipe import load_recipe
from kvpact.spec import DEFAULT_SPEC

if TYPE_CHECKING:
    import torch

    from kvpact.calibration import Calibration
    from kvpact.evaluate import Candidate


class InputError(KVPactError, ValueError):
    """A command was given something it can't use."""


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, of stdin for ``-``, or the shipped book for ``@book``."""
    if str(path) == "@book":
        return book_path().read_text("utf-8")
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
    """Return the text of a file and a prompt, a blank line between them."""
    parts = [read_text(file)] if file is not None else []
    parts += [read_text(Path(prompt)) if prompt == "-" else prompt] if prompt else []
    if not parts:
        raise InputError(f"nothing to {purpose}; give a prompt or --file")
    return "\n\n".join(parts)


def texts_of(paths: list[Path]) -> list[tuple[str, str]]:
    """Return names and contents of texts, all of them read; without any, the shipped book's."""
    if not paths:
        return [("northanger_abbey.txt", book_path().read_text("utf-8"))]
    if len(set(paths)) < len(paths):
        raise InputError("--text names a file twice; give each once")
    names = [path.name for path in paths]
    same = len(set(names)) < len(names)
    return [(str(path) if same else path.name, read_text(path)) for path in paths]


@contextmanager
def results_folder(
    path: Path | None, force: bool, *names: str, plots: bool = True
) -> Iterator[None]:
    """Make a folder for results, unless it has files of others by these names (patterns).

    It is made before the work starts; if that fails, it is removed. What `plots` needs matplotlib.
    """
    if path is None:
        yield
        return
    if plots:
        require("matplotlib", extra="eval")
    own = any('"kvpact"' in x.read_text("utf-8", "replace") for x in path.glob("*.json"))
    if not (own or force) and (there := [x for name in names for x in path.glob(name)]):
        raise InputError(
            f"{there[0]} is there and was not written by kvpact: give another --out, or --force"
        )
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"{path} can't be made: {error.strerror}; give another --out"
            raise InputError(text) from error
        if not os.access(path, os.W_OK):
            raise InputError(f"{path} can't be written to; give another --out")
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def check_output(path: Path, what: str, read: Callable[[Path], object], force: bool) -> None:
    """Raise `InputError` where a file to write has no folder, or would replace one of a user's.

    A file that `read` accepts is one that kvpact wrote, and may be replaced.
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path.absolute().parent} is no folder; make it first")
    if not force and is_of_others(path, read):
        raise InputError(
            f"{path} is there and is no {what}: give another --out, or --force to replace it"
        )


def note_if_short(held: int, wanted: int) -> None:
    """Say so where a text has fewer tokens than were asked for."""
    if held < wanted:
        note(f"the text has {held} tokens, fewer than the {wanted} asked for")


def require(*packages: str, extra: str) -> None:
    """Raise `BackendUnavailable` with the pip command where a package of an extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise BackendUnavailable(f"{names} not installed; pip install 'kvpact[{extra}]'")


def candidate_of(
    spec: str | None, sliding: str | None = None, budget: str | None = None
) -> Candidate:
    """Return a spec or recipe; a bad spec or budget is refused now, before a model is loaded."""
    from kvpact.evaluate import Candidate
    from kvpact.integrations.models import PACKAGED

    spec = (DEFAULT_SPEC if budget is None else "none") if spec is None else spec
    if spec in PACKAGED or spec in model_table()["models"] or Path(spec, "config.json").exists():
        raise InputError(f"{spec!r} is a model and no spec; write: {DEFAULT_SPEC} --model {spec}")
    if budget is not None:
        from kvpact.cache.budget.budget import budget_of

        budget_of(budget, ())
    candidate = Candidate(spec, sliding=sliding, budget=budget)
    candidate.sliding_spec()
    if candidate.is_recipe:
        load_recipe(spec)
    else:
        candidate.layers(1)
    return candidate


def check_models(names: list[str]) -> None:
    """Raise for the first model that is not there, before another one has run for minutes."""
    from kvpact.integrations.models import check_model

    for name in names:
        check_model(name)


def open_model(name: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, saying so on stderr; torch may use so many CPU threads."""
    import torch

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
    """Return a file's calibration, with a note if it was made of another model."""
    if path is None:
        return None
    from kvpact.calibration import Calibration
    from kvpact.integrations.fingerprint import model_fingerprint

    found = Calibration.load(path)
    if found.model and found.model != model_fingerprint(network):
        note(f"{path} was made of another model, or of this one in another dtype")
    return found


def check_positions(model: Any, tokens: int, new: int, remedy: str) -> None:
    """Raise `InputError` with a `remedy` unless there are tokens, and positions for them all."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if tokens == 0 or (limit is not None and tokens + new > limit):
        more = f" and {new} new ones" if new else ""
        what = f"{tokens} tokens{more}"
        raise InputError(f"{what} do not fit the model's {limit} positions; {remedy}")


def prompted(
    candidate: Candidate,
    text: str,
    model: tuple[str, str, int | None],
    calibration: Path | None,
    *,
    chat: bool = False,
    new: int = 0,
    most: int | None = None,
) -> tuple[Any, Any, torch.Tensor, Any, Calibration | None]:
    """Load a model (see `open_model`) that takes a text, or its `most` last tokens, and `new` ones.

    Returns it, its tokenizer, the text's ids ``[1, T]``, an empty cache, and the `calibration`.
    """
    from kvpact.evaluate import compressed_cache

    network, tokenizer = open_model(*model)
    if most is not None:
        text = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][-most:])
    ids = encode(tokenizer, text, chat=chat)
    remedy = "take the last ones alone, by --prompt-tokens" + ", or fewer new ones" * bool(new)
    check_positions(network, ids.shape[1], new, remedy)
    known = load_calibration(calibration, network)
    cache = compressed_cache(network, replace(candidate, calibration=known))
    return network, tokenizer, ids, cache, known


def continued(model: Any, ids: torch.Tensor, cache: Any, new: int, **options: Any) -> torch.Tensor:
    """Continue a text, ``[1, T]``, greedily unless `options` differ; cached tokens are kept."""
    import torch

    from kvpact.integrations.transformers.versions import named

    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ids = ids.to(model.device)
    options = {**greedy, **named(cache), "max_new_tokens": new, **options}
    tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tokens


def encode(tokenizer: Any, text: str, *, chat: bool = False) -> torch.Tensor:
    """Return the token ids ``[1, T]`` of a text."""
    if chat and not tokenizer.chat_template:
        raise InputError("no chat template; `kvpact generate` without --chat continues a text")
    if chat:
        message = [{"role": "user", "content": text}]
        options = {"return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, **options)
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: torch.Tensor = inputs["input_ids"]
    return ids
