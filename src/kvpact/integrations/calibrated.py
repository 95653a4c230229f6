"""Calibration files named in an engine's settings, and the part that each layer takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvpact.calibration import Calibration
from kvpact.calibration.base import State
from kvpact.errors import SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrations import learning, of_files
from kvpact.integrations.fingerprint import model_folder
from kvpact.spec import Spec

Learnt = tuple[State, State]
"""The state that the codecs of a layer learnt, of K and of V; mostly empty."""
NOTHING: Learnt = ({}, {})


class Known(NamedTuple):
    """A calibration, and how errors name the file."""

    held: Calibration
    name: str


def read(where: str, setting: str, specs: Sequence[Spec] = ()) -> Known:
    """Read the calibration file that a setting names, or find or make that of a model to specs."""
    name = f"{setting}={where!r}"
    if specs and not Path(where).is_file() and (folder := model_folder(where)) is not None:
        return Known(of_files(folder, learning(specs)), name)
    try:
        return Known(Calibration.load(where), name)
    except OSError as error:
        raise SpecError(
            f"{name} can't be read ({error}): name a model's folder, or a file that `kvpact "
            "calibrate MODEL --out FILE` wrote"
        ) from error


def learnt_of(
    known: Known | None,
    numbers: Sequence[int],
    specs: Sequence[Spec],
    geometry: CacheGeometry,
    total: int,
) -> list[Learnt]:
    """Return the learnt states for codecs of some of a model's `total` layers; or `SpecError`."""
    if known is None:
        return [NOTHING] * len(numbers)
    held, name = known
    shape = geometry.num_kv_heads, geometry.head_dim, geometry.value_dim
    if max(held.layers, default=-1) >= total:
        raise SpecError(
            f"{name} is of {max(held.layers) + 1} layers, the model has {total}: it was made of "
            "another model"
        )
    for number in numbers:
        one = held.layers.get(number)
        found = None if one is None else (one.heads, one.key_dim, one.value_dim)
        if found != shape:
            raise SpecError(
                f"{name} has of layer {number} {found or 'nothing'}, the model has {shape} KV "
                "heads and widths of K and V: it was made of another model"
            )
    found_states = held.select(numbers).states(specs, geometry)
    return [found_states.get(i, NOTHING) for i in range(len(numbers))]
