"""Calibrations as files: the container of snapshots, one section for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from kvpact.errors import FormatError
from kvpact.files import read_regular
from kvpact.snapshot.container import Container
from kvpact.snapshot.header import COUNT, SIZE, check, need

KIND = "kvpact.calibration"
VERSION = 1


def write(
    path: str | PathLike[str], header: Mapping[str, Any], layers: Sequence[Mapping[str, Tensor]]
) -> None:
    """Write a file.

    `header`: ``model``, ``tokens``, and of each layer its shape and the names of what each method
    learnt; `layers`: of each layer, tensors by name.
    """
    tensors = [item for layer in layers for item in layer.items()]
    runs = [(1, [sum(x.nbytes for x in layer.values()) for layer in layers])]
    Container.build(KIND, VERSION, header, tensors, runs).save(path)


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the header and, in the order in which it names them, the tensors; all is checked."""
    held = Container(read_regular(path), KIND, VERSION)
    header = {name: value for name, value in held.manifest.items() if name != "sections"}
    check(header, {"layers": dict, "model": str, "tokens": SIZE}, f"{path}: header")
    for number, layer in header["layers"].items():
        check(number, re.compile("0|[1-9][0-9]{0,5}"), f"{path}: a layer's number")
        check(layer, {"k": dict, "shape": [COUNT], "v": dict}, f"{path}: layer {number}")
        need(len(layer["shape"]) == 3, f"{path}: the shape of layer {number}")
        check([*layer["k"].values(), *layer["v"].values()], [[str]], f"{path}: what was learnt")
    layers = len(header["layers"])
    if held.num_sections != layers:
        raise FormatError(f"{path}: {held.num_sections} sections for {layers} layers")
    tensors: dict[str, Tensor] = {}
    for index in range(held.num_sections):
        tensors |= held.tensors(index)
    wanted = [
        f"{index}.{side}.{i}.{name}"
        for index, layer in enumerate(header["layers"].values())
        for side in ("k", "v")
        for i, names in enumerate(layer[side].values())
        for name in names
    ]
    if list(tensors) != wanted:
        raise FormatError(f"{path}: the tensors are not those that the header names")
    return header, list(tensors.values())
