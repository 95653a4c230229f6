"""Calibrations' home: what methods learnt of a model is kept, and found by its fingerprint.

A calibration lies at ``$KVPACT_CACHE/calibrations/FINGERPRINT/SPEC.kvcal``, where the fingerprint
is of the model as it is loaded, and of its files, too, where these are known. Those that kvpact
ships are put there instead of being made.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvpact.calibration import Calibration
from kvpact.calibration.base import VERSION
from kvpact.data import calibrated
from kvpact.errors import FormatError, IntegrityError, SpecError, StoreError
from kvpact.integrations.fingerprint import files_fingerprint
from kvpact.integrations.models import first_line, model_cache_dir, require
from kvpact.methods.fitted import FittedCodec, KeysThatLearn
from kvpact.spec import Spec
from kvpact.stores import Store, StoreWarning
from kvpact.stores.base import check_store

TOKENS = 4096  # tokens of the shipped text that a calibration learns from


def learning(specs: Iterable[Spec]) -> list[Spec]:
    """Return, once each, those specs of which a method learns from tokens."""
    return [spec for spec in dict.fromkeys(specs) if _learnt(spec)]


def _learnt(spec: Spec) -> list[str]:
    """Return what a spec's methods learn, by side; their sinks change it, and its shapes."""
    codecs = spec.codecs(64, 64, torch.float32)
    pairs = zip("kv", codecs, (spec.key, spec.value), strict=True)
    return [
        f"{side}:{method.learnt_name()},sinks={method.sinks},{_shapes(codec)}"
        for side, codec, method in pairs
        if isinstance(codec, FittedCodec)
    ]


def _shapes(codec: FittedCodec) -> str:
    return str(codec.state_fields()) if isinstance(codec, KeysThatLearn) else ""


def name_of(specs: Sequence[Spec]) -> str:
    """Return a name for what specs learn: equal ones, of this version, learn the same."""
    learnt = sorted({text for spec in specs for text in _learnt(spec)})
    digest = hashlib.blake2b(json.dumps([VERSION, learnt]).encode(), digest_size=6).hexdigest()
    names = sorted({text[2:].partition("/")[0] for text in learnt})
    return f"{'-'.join(names)}-{digest}"


def place_of(fingerprint: str, specs: Sequence[Spec]) -> Path:
    """Return where the calibration of a model to specs lies, or would."""
    home = model_cache_dir() / "calibrations"
    return home / re.sub(r"\W", "-", fingerprint)[:96] / f"{name_of(specs)}.kvcal"


def found(fingerprint: str, specs: Sequence[Spec]) -> Calibration | None:
    """Return the calibration of a model to specs, None where there is none; a damaged one goes."""
    path = place_of(fingerprint, specs)
    try:
        return Calibration.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (FormatError, IntegrityError) as error:
        tell(f"{path} is damaged ({first_line(error)}), and is made again")
        with suppress(OSError):
            path.unlink()
        return None


@cache
def shipped_models() -> dict[str, dict[str, Any]]:
    """Return by what each model is known of which kvpact ships calibrations."""
    return tomllib.loads((calibrated() / "models.toml").read_text("utf-8"))


def shipped(fingerprint: str, specs: Sequence[Spec]) -> Calibration | None:
    """Return the calibration to specs that kvpact ships for a model, None where there is none."""
    for model, known in shipped_models().items():
        path = calibrated() / model / f"{name_of(specs)}.kvcal"
        if fingerprint in (known["loaded"], known["files"]) and path.is_file():
            return Calibration.from_bytes(path.read_bytes(), str(path))
    return None


def keep(calibration: Calibration, fingerprint: str, specs: Sequence[Spec]) -> Path:
    """Put a calibration where `found` finds it, in place of what is there; return where."""
    path = place_of(fingerprint, specs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration.needed(specs).save(path)
    except OSError as error:
        raise _unkept(path, error) from error
    return path


def kept(fingerprint: str, specs: Sequence[Spec], make: Callable[[], Calibration]) -> Calibration:
    """Return the calibration of a model to specs, made where there is none.

    Of several processes one makes it, and the others wait.
    """
    if (known := found(fingerprint, specs)) is not None:
        return known
    require("filelock")
    from filelock import FileLock

    path = place_of(fingerprint, specs)
    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise _unkept(path, error) from error
    try:
        if (known := found(fingerprint, specs)) is not None:
            return known
        made = make()
        keep(made, fingerprint, specs)
        return made.needed(specs)
    finally:
        lock.release()


def _unkept(path: Path, error: OSError) -> SpecError:
    return SpecError(
        f"no calibration can be kept in {path.parent} ({first_line(error)}): set KVPACT_CACHE to a "
        "folder that can be written, or give a calibration file"
    )


def shared(
    store: Store, fingerprint: str, specs: Sequence[Spec], make: Callable[[], Calibration]
) -> Calibration:
    """Return the calibration that a store has, which gets this machine's where it has none.

    A store that keeps nothing, or can't be reached, leaves each machine its own: their prefixes
    have unlike keys then, if the calibrations differ.
    """
    text = f"calibration/{fingerprint}/{name_of(specs)}"
    key = hashlib.blake2b(text.encode(), digest_size=32).digest()
    check_store(store)
    blob = store.get(key)
    if blob is not None:
        return Calibration.from_bytes(blob)
    made = make()
    try:
        store.put(key, made.to_bytes())
        blob = store.get(key)  # another machine's, perhaps, from now on
    except StoreError as error:
        warnings.warn(f"the store has no calibration: {error}", StoreWarning, stacklevel=4)
    return made if blob is None else Calibration.from_bytes(blob)


def of_files(folder: Path, specs: Sequence[Spec]) -> Calibration:
    """Return the calibration of the model in a folder, made by a process of its own if need be."""
    fingerprint = files_fingerprint(folder, {})

    def make() -> Calibration:
        if (ready := shipped(fingerprint, specs)) is not None:
            return ready
        tell(f"calibrating {', '.join(map(str, specs))} to {folder}, once ...")
        with TemporaryDirectory() as place:
            out = Path(place) / "made.kvcal"
            given = [part for spec in specs for part in ("--spec", str(spec))]
            command = [sys.executable, "-m", "kvpact", "calibrate", str(folder), *given]
            ran = subprocess.run([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
            if ran.returncode or not out.exists():
                raise SpecError(
                    f"{folder} could not be calibrated (above): run `kvpact calibrate {folder}"
                    f"{''.join(f' --spec {spec}' for spec in specs)}` where transformers can load "
                    "it, or name a spec that learns nothing, as 'turboquant:bits=4,sinks=0'"
                )
            return Calibration.load(out)

    return kept(fingerprint, specs, make)


def tell(text: str) -> None:
    """Say one line, as commands and engines show it."""
    print(f"kvpact: {text}", file=sys.stderr, flush=True)
