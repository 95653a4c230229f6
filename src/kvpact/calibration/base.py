"""`Calibration`: what methods learnt of a model, by layer, side and method."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.callable_package import told
from kvpact.errors import FormatError, SpecError
from kvpact.files import read_regular
from kvpact.geometry import CacheGeometry
from kvpact.key_rotation import KeyRotation
from kvpact.methods.base import Method, make_codec
from kvpact.methods.fitted import Calibrating, FittedCodec
from kvpact.snapshot.container import Container
from kvpact.snapshot.header import COUNT, SIZE, check, need
from kvpact.spec import Spec

State = Mapping[str, Tensor]
"""Learnt tensors of a codec, by name (`Codec.state`)."""


@dataclass(frozen=True)
class LayerCalibration:
    """The state that methods learnt of one layer's K and V, by `Method.learnt_name`."""

    heads: int
    key_dim: int
    value_dim: int
    k: Mapping[str, State] = field(default_factory=dict)
    v: Mapping[str, State] = field(default_factory=dict)


@told
@dataclass(frozen=True)
class Calibration:
    """The state that methods learnt of a model from calibration texts.

    Give it as `calibration` where a cache is made. With it pages, prefixes of many prompts and
    snapshots share one state, and `pca` knows the model's RoPE and queries.

    Parameters
    ----------
    layers : mapping
        Layer of the model -> what was learnt.
    model : str
        The model's fingerprint, or "" where it is not known.
    tokens : int
        Calibration tokens, of all texts.

    Examples
    --------
    >>> calibration = Calibration.load("smollm2.kvcal")
    >>> cache = CompressedCache(model, "trellis:bits=4", calibration=calibration)
    """

    layers: Mapping[int, LayerCalibration]
    model: str = ""
    tokens: int = 0

    def __post_init__(self) -> None:
        layers: Any = self.layers
        if not isinstance(layers, Mapping):
            line = "kvpact.calibration_of(model, spec, tokenizer=tokenizer)"
            line = "Calibration.load(path)" if isinstance(layers, str | PathLike) else line
            given = type(layers).__name__
            raise SpecError(f"{given} stands where layers should; write: {line}")

    def select(self, layers: Sequence[int]) -> Calibration:
        """Return the calibration of some layers, numbered from 0 in the order given."""
        held = {i: self.layers[x] for i, x in enumerate(layers) if x in self.layers}
        return Calibration(held, self.model, self.tokens)

    def needed(self, specs: Sequence[Spec]) -> Calibration:
        """Return the calibration with what the methods of specs learn, and nothing else."""
        names = {method.learnt_name() for spec in specs for method in (spec.key, spec.value)}
        return self._with(lambda held: {name: held[name] for name in held if name in names})

    def to(self, device: torch.device | str) -> Calibration:
        """Return the calibration with its tensors on a device."""
        return self._with(
            lambda held: {n: {part: x.to(device) for part, x in s.items()} for n, s in held.items()}
        )

    def _with(self, change: Callable[[Mapping[str, State]], Mapping[str, State]]) -> Calibration:
        """Return the calibration with what was learnt of each layer's K and V changed."""
        layers = {i: replace(x, k=change(x.k), v=change(x.v)) for i, x in self.layers.items()}
        return replace(self, layers=layers)

    def states(
        self, specs: Sequence[Spec], geometry: CacheGeometry
    ) -> dict[int, tuple[State, State]]:
        """Return what the codecs of a cache learnt, by layer, of those layers that have its shape.

        Raises `SpecError` where a method's is not here or of another shape, `FormatError` where it
        is no state of its codec, which may be one of other bits.
        """
        shape = geometry.num_kv_heads, geometry.head_dim, geometry.value_dim
        keys = geometry.head_dim > 0  # a cache without them takes what was learnt of V
        shapes = {(x.heads, x.key_dim * keys, x.value_dim) for x in self.layers.values()}
        if shape not in shapes and shapes:
            raise SpecError(
                f"the calibration is of layers with {sorted(shapes)} KV heads and widths of K and "
                f"V, the cache's have {shape}: it was made of another model"
            )
        found: dict[int, tuple[State, State]] = {}
        for index, spec in enumerate(specs):
            held = self.layers.get(index)
            if held is not None and (held.heads, held.key_dim * keys, held.value_dim) != shape:
                continue
            k = self._state(index, "k", spec.key, geometry)
            v = self._state(index, "v", spec.value, geometry)
            if k or v:
                found[index] = k, v
        return found

    def _state(self, layer: int, side: str, method: Method, geometry: CacheGeometry) -> State:
        dim = geometry.head_dim if side == "k" else geometry.value_dim
        codec = make_codec(method, side == "k", dim, geometry.dtype or torch.float32)
        if not isinstance(codec, FittedCodec):
            return {}
        held = self.layers.get(layer)
        known: Mapping[str, State] = {} if held is None else held.k if side == "k" else held.v
        if method.learnt_name() not in known:
            there = ", ".join(sorted(known)) or "nothing"
            raise SpecError(
                f"the calibration has nothing of {method.learnt_name()!r} for {side.upper()} of "
                f"layer {layer} (it has {there}): run kvpact calibrate with --spec for this spec"
            )
        state = known[method.learnt_name()]
        try:
            codec.restore(state)
        except FormatError as error:
            raise FormatError(
                f"the calibration has another state of {method.learnt_name()!r} for {side.upper()} "
                f"of layer {layer} ({error}); at 6 bits `trellis` learns another one than at "
                "fewer: run kvpact calibrate with --spec for this spec"
            ) from error
        return state

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file (safetensors with checksums): whole, or with an `OSError` not at all."""
        _container(self._header(), self._tensors()).save(path)

    def to_bytes(self) -> bytes:
        """Return what `save` writes, for `from_bytes`."""
        return _container(self._header(), self._tensors()).to_bytes()

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Read a file and check every byte; states are checked when a cache is made.

        Raises
        ------
        FormatError
            It is no calibration, of an unknown version, or damaged.
        IntegrityError
            Something was changed.
        FileNotFoundError
            There is no such file.
        """
        if not isinstance(path, str | PathLike):
            raise SpecError(f"a calibration is none or a file of `kvpact calibrate`, not {path!r}")
        return cls.from_bytes(read_regular(path), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "calibration") -> Calibration:
        """Read what `to_bytes` gave; errors, which begin with `name`, are those of `load`."""
        header, tensors = _read(data, name)
        layers, following = {}, iter(tensors)
        for layer, about in header["layers"].items():
            k, v = (
                {name: {part: next(following) for part in parts} for name, parts in side.items()}
                for side in (about["k"], about["v"])
            )
            heads, key_dim, value_dim = about["shape"]
            layers[int(layer)] = LayerCalibration(heads, key_dim, value_dim, k, v)
        return cls(layers, header["model"], header["tokens"])

    def _header(self) -> dict[str, Any]:
        layers = {
            str(layer): {
                "shape": [held.heads, held.key_dim, held.value_dim],
                "k": {name: sorted(state) for name, state in held.k.items()},
                "v": {name: sorted(state) for name, state in held.v.items()},
            }
            for layer, held in sorted(self.layers.items())
        }
        return {"layers": layers, "model": self.model, "tokens": self.tokens}

    def _tensors(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each layer, by name in the file."""
        return [
            {
                f"{index}.{side}.{i}.{name}": state[name]
                for side, methods in (("k", held.k), ("v", held.v))
                for i, state in enumerate(methods.values())
                for name in sorted(state)
            }
            for index, (_, held) in enumerate(sorted(self.layers.items()))
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for layer in self._tensors() for x in layer.values())

    def __repr__(self) -> str:
        names = sorted({n for x in self.layers.values() for n in (*x.k, *x.v)})
        return (
            f"Calibration(layers={len(self.layers)}, tokens={self.tokens}, "
            f"methods={', '.join(names)}, nbytes={self.nbytes})"
        )


class LayerTokens(NamedTuple):
    """Calibration tokens of one layer, rows of equal length, from position 0 on; see `Calibrating`.

    - `output_energy`: `[H_kv, D_v]`: squares of what the output projection makes of channels of V.
    - `less_offset`: keys without their offset, of which methods learn that store keys after RoPE.
    """

    k: Tensor
    v: Tensor
    query_energy: Tensor
    output_energy: Tensor | None = None
    rotation: KeyRotation | None = None
    less_offset: Tensor | None = None

    def keys_for(self, codec: FittedCodec) -> Tensor:
        """Return the keys as a cache gives them to a codec, but for the rotation."""
        if self.less_offset is None or (codec.before_rope and self.rotation is not None):
            return self.k
        return self.less_offset


def calibrate_layer(tokens: LayerTokens, specs: Sequence[Spec]) -> LayerCalibration:
    """Return what the methods of specs learn of a layer. Raises `SpecError` where none does."""
    k: dict[str, State] = {}
    v: dict[str, State] = {}
    for spec in specs:
        for side, method, x in ((k, spec.key, tokens.k), (v, spec.value, tokens.v)):
            make = method.key_codec if side is k else method.value_codec
            codec = make(x.shape[3], x.dtype)
            if not isinstance(codec, FittedCodec):
                continue
            known = Calibrating(
                tokens.v, tokens.query_energy, tokens.output_energy, tokens.rotation, method.sinks
            )
            x = tokens.keys_for(codec) if side is k else x
            side[method.learnt_name()] = codec.calibrated(x, known).state()
    if not k and not v:
        names = ", ".join(map(str, specs))
        raise SpecError(f"none of these methods learns from tokens: {names}")
    return LayerCalibration(tokens.k.shape[1], tokens.k.shape[3], tokens.v.shape[3], k, v)


KIND = "kvpact.calibration"
VERSION = 1


def _container(header: Mapping[str, Any], layers: Sequence[Mapping[str, Tensor]]) -> Container:
    """Return a file: the header, and of each layer tensors by name."""
    tensors = [item for layer in layers for item in layer.items()]
    runs = [(1, [sum(x.nbytes for x in layer.values()) for layer in layers])]
    return Container.build(KIND, VERSION, header, tensors, runs)


def _read(data: bytes, path: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the header and, in the order in which it names them, the tensors; all is checked."""
    held = Container(data, KIND, VERSION)
    header = held.about
    check(header, {"layers": dict, "model": str, "tokens": SIZE}, f"{path}: header")
    for number, layer in header["layers"].items():
        check(number, re.compile("0|[1-9][0-9]{0,5}"), f"{path}: a layer's number")
        check(layer, {"k": dict, "shape": [COUNT], "v": dict}, f"{path}: layer {number}")
        need(len(layer["shape"]) == 3, f"{path}: the shape of layer {number}")
        check([*layer["k"].values(), *layer["v"].values()], [[str]], f"{path}: what was learnt")
    layers = len(header["layers"])
    if held.num_sections != layers:
        raise FormatError(f"{path}: {held.num_sections} sections for {layers} layers")
    tensors = held.all_tensors()
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
