"""The plug-in's second setting, an environment variable: a file of what codecs learnt, by layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache

from torch import Tensor

from kvpact.calibration import Calibration
from kvpact.errors import SpecError
from kvpact.geometry import CacheGeometry
from kvpact.spec import Spec

CALIBRATION = "KVPACT_VLLM_CALIBRATION"
Learnt = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""What the codecs of a layer learnt, of K and of V; mostly nothing."""
NOTHING: Learnt = ({}, {})


def calibration_file() -> str | None:
    """Return the path that the variable holds; None where it is not set."""
    return os.environ.get(CALIBRATION, "").strip() or None


def calibration() -> Calibration | None:
    """Return what the file holds, None where none is named. Raises `SpecError`, `FormatError`."""
    path = calibration_file()
    return None if path is None else _loaded(path)


@lru_cache(maxsize=1)
def _loaded(path: str) -> Calibration:
    try:
        return Calibration.load(path)
    except OSError as error:
        raise SpecError(
            f"{CALIBRATION}={path!r} can't be read ({error}); `kvpact calibrate MODEL --out FILE` "
            "writes such a file"
        ) from error


def learnt_of(
    numbers: Sequence[int], specs: Sequence[Spec], geometry: CacheGeometry, total: int
) -> list[Learnt]:
    """Return what the codecs of some layers of the model learnt, of all heads.

    `numbers`: the layers', among `total`; `specs`: of each; `geometry`: of all of them. Raises
    `SpecError` where the file is of another model, as far as that can be told, or of other methods.
    """
    held = calibration()
    if held is None:
        return [NOTHING] * len(numbers)
    shape = geometry.num_kv_heads, geometry.head_dim, geometry.value_dim
    if max(held.layers, default=-1) >= total:
        raise SpecError(
            f"{CALIBRATION}={calibration_file()!r} is of {max(held.layers) + 1} layers, the model "
            f"has {total}: it was made of another model"
        )
    for number in numbers:
        one = held.layers.get(number)
        found = None if one is None else (one.heads, one.key_dim, one.value_dim)
        if found != shape:
            raise SpecError(
                f"{CALIBRATION}={calibration_file()!r} has of layer {number} "
                f"{found or 'nothing'}, the model has {shape} KV heads and widths of K and V: it "
                "was made of another model"
            )
    found_states = held.select(numbers).states(specs, geometry)
    return [found_states.get(i, NOTHING) for i in range(len(numbers))]


def of_rank(learnt: Learnt, heads: int, rank: int, ranks: int) -> Learnt:
    """Return what was learnt of the `heads` that one of tensor-parallel ranks has."""

    def part(x: Tensor) -> Tensor:
        start = rank * len(x) // ranks  # heads may be fewer than ranks, which then share them
        return x[start : start + heads]

    k, v = ({name: part(x) for name, x in side.items()} for side in learnt)
    return k, v
