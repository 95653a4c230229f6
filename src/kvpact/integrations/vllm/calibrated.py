"""The plug-in's second setting, an environment variable: the file of a calibration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from kvpact.calibration import Calibration
from kvpact.geometry import CacheGeometry
from kvpact.integrations import calibrated
from kvpact.integrations.calibrated import Known, Learnt
from kvpact.spec import Spec

CALIBRATION = "KVPACT_VLLM_CALIBRATION"


def calibration_file() -> str | None:
    """Return the path that the variable holds; None where it is not set."""
    return os.environ.get(CALIBRATION, "").strip() or None


def calibration() -> Calibration | None:
    """Return what the file holds, None where none is named. Raises `SpecError`, `FormatError`."""
    known = _known()
    return None if known is None else known.held


def _known() -> Known | None:
    path = calibration_file()
    return None if path is None else _loaded(path)


@lru_cache(maxsize=1)
def _loaded(path: str) -> Known:
    return calibrated.read(path, CALIBRATION)


def learnt_of(
    numbers: Sequence[int], specs: Sequence[Spec], geometry: CacheGeometry, total: int
) -> list[Learnt]:
    """Return what the codecs of some layers of the model learnt: `calibrated.learnt_of`."""
    return calibrated.learnt_of(_known(), numbers, specs, geometry, total)


def of_rank(learnt: Learnt, heads: int, rank: int, ranks: int) -> Learnt:
    """Return what was learnt of the `heads` that one of tensor-parallel ranks has."""

    def part(x: Tensor) -> Tensor:
        start = rank * len(x) // ranks  # heads may be fewer than ranks, which then share them
        return x[start : start + heads]

    k, v = ({name: part(x) for name, x in side.items()} for side in learnt)
    return k, v
