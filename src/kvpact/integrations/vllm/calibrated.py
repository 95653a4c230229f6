"""The calibration of pages' codecs: from a file that a variable names, or the model's files.

Where there is no calibration, a process of its own makes it when the engine starts.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from kvpact.errors import SpecError
from kvpact.integrations import calibrated
from kvpact.integrations.calibrated import Known, Learnt
from kvpact.integrations.calibrations import learning, of_files
from kvpact.integrations.fingerprint import model_folder
from kvpact.spec import Spec

CALIBRATION = "KVPACT_VLLM_CALIBRATION"


def calibration_file() -> str | None:
    """Return the path that the variable holds; None where it is not set."""
    return os.environ.get(CALIBRATION, "").strip() or None


def named() -> Known | None:
    """Return the named file's calibration, or None. Raises `SpecError`, `FormatError`."""
    path = calibration_file()
    return None if path is None else _loaded(path)


@lru_cache(maxsize=1)
def _loaded(path: str) -> Known:
    return calibrated.read(path, CALIBRATION)


def known_of(model: Any, specs: Sequence[Spec]) -> Known | None:
    """Return the calibration for the specs of a model's layers, None where they learn nothing."""
    learnt = tuple(learning(specs))
    return (named() or _found(model.model, model.revision, learnt)) if learnt else None


@lru_cache(maxsize=4)
def _found(name: str, revision: str | None, specs: tuple[Spec, ...]) -> Known:
    folder = model_folder(name, revision)
    if folder is None:
        raise SpecError(
            f"{', '.join(map(str, specs))} learns from a model, and the files of {name} are not on "
            f"this machine: set {CALIBRATION} to a file that `kvpact calibrate` wrote"
        )
    return Known(of_files(folder, specs), f"the calibration of {folder}")


def of_rank(learnt: Learnt, heads: int, rank: int, ranks: int) -> Learnt:
    """Return the learnt states of the `heads` of one tensor-parallel rank."""

    def part(x: Tensor) -> Tensor:
        start = rank * len(x) // ranks  # heads may be fewer than ranks, which then share them
        return x[start : start + heads]

    k, v = ({name: part(x) for name, x in side.items()} for side in learnt)
    return k, v
