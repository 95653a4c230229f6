"""Calibrations as files: the container of snapshots, one section for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from kvpact.errors import FormatError
from kvpact.files import read_regular
from kvpact.snapshot.container import Container

KIND = "kvpact.calibration"
VERSION = 1
SIDES = ("k", "v")


def write(
    path: str | PathLike[str], header: Mapping[str, Any], layers: Sequence[Mapping[str, Tensor]]
) -> None:
    """Write a file.

    `header`: JSON-ready: ``model``, ``tokens``, and of each layer its shape and the names of what
    each method learnt; `layers`: of each layer, tensors by name.
    """
    tensors = [item for layer in layers for item in layer.items()]
    runs = [(1, [sum(x.nbytes for x in layer.values()) for layer in layers])]
    Container.build(KIND, VERSION, header, tensors, runs).save(path)


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return header and tensors of a file, every byte checked."""
    held = Container(read_regular(path), KIND, VERSION)
    header = {name: value for name, value in held.manifest.items() if name != "sections"}
    if not _is_header(header):
        raise FormatError(f"{path}: the calibration's header is damaged")
    layers = len(header["layers"])
    if held.num_sections != layers:
        raise FormatError(f"{path}: {held.num_sections} sections for {layers} layers")
    tensors: dict[str, Tensor] = {}
    for index in range(held.num_sections):
        tensors |= held.tensors(index)
    wanted = [
        f"{index}.{side}.{i}.{name}"
        for index, layer in enumerate(header["layers"].values())
        for side in SIDES
        for i, names in enumerate(layer[side].values())
        for name in names
    ]
    if list(tensors) != wanted:
        raise FormatError(f"{path}: the tensors are not those that the header names")
    return header, tensors


def _is_header(header: Mapping[str, Any]) -> bool:
    if set(header) != {"layers", "model", "tokens"}:
        return False
    layers, model, tokens = header["layers"], header["model"], header["tokens"]
    good = isinstance(layers, dict) and isinstance(model, str) and type(tokens) is int
    good = good and tokens >= 0
    return good and all(map(_is_layer, layers.items()))


def _is_layer(item: tuple[str, Any]) -> bool:
    number, data = item
    if len(number) > 6 or not (number.isascii() and number.isdigit()):
        return False
    if str(int(number)) != number or not isinstance(data, dict):
        return False
    shape = data.get("shape")
    if set(data) != {"shape", *SIDES} or not isinstance(shape, list) or len(shape) != 3:
        return False
    if any(type(x) is not int or x < 1 for x in shape):
        return False
    return all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for side in SIDES
        for names in (data[side].values() if isinstance(data[side], dict) else [None])
    )
