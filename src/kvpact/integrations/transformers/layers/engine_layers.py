"""The tensors of transformers' own cache layers, as records: streams, rings and states.

A *stream* grows with every token, a *ring* keeps the last tokens of a stream, and a *state* is of
fixed size and stands for all tokens up to one count. `RECORDS` tells for each class of layers which
attributes hold them, and which of their axes are rows and tokens. A class or a tensor that is not
in it is refused by name, so that nothing which a new transformers caches is lost in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.integrations.transformers import versions
from kvpact.integrations.transformers.layers.entries import EntriesLayer
from kvpact.integrations.transformers.layers.indexed import CompressedIndexedLayer
from kvpact.integrations.transformers.layers.rings import PACKED_RING
from kvpact.integrations.transformers.layers.sliding import CompressedSlidingLayer
from kvpact.integrations.transformers.versions import LinearAttentionCacheLayerMixin
from kvpact.prefixes.checkpoints import RecordShape
from kvpact.snapshot import RecordState


class Attribute(NamedTuple):
    """An attribute with a layer's record: a tensor, or a dict of them.

    A stream may be packed: then it is held as parts, and as a whole it is made of them. What is
    ``fixed`` stands for no token, but for an image.
    """

    name: str
    kind: str
    rows: int = 0  # the axes
    tokens: int | None = None  # likewise


_RINGS = Attribute("keys", "ring", 0, 2), Attribute("values", "ring", 0, 2)
_STATES = Attribute("conv_states", "state"), Attribute("recurrent_states", "state")
_ENTRIES = (_RINGS[0], Attribute("buffer_kv", "state"), Attribute("buffer_gate", "state"))
_OVERLAPS = Attribute("overlap_kv", "state"), Attribute("overlap_gate", "state")
_INDEX = tuple(Attribute(f"index_{part}", "part") for part in ("codes", "scale", "tail"))
RECORDS: dict[str, tuple[Attribute, ...]] = {
    "CrossAttentionLayer": (Attribute("keys", "fixed"), Attribute("values", "fixed")),
    "DynamicSlidingWindowLayer": _RINGS,
    "LinearAttentionLayer": _STATES,
    "LinearAttentionAndSlidingWindowAttentionLayer": (*_RINGS, *_STATES),
    "CompressedHybridLayer": _STATES,
    "CompressedIndexedLayer": (
        *_INDEX,
        Attribute("indexer_keys", "whole", 0, 1),
        Attribute("indexer_position_ids", "stream", 1, 2),
    ),
    "CompressedDeepseekV4HCACache": _ENTRIES,
    "CompressedDeepseekV4CSACache": (*_ENTRIES, *_OVERLAPS, *_INDEX),
    "CompressedValueLayer": (Attribute("positions", "stream", 0, 1),),
    "CompressedSlidingLayer": (
        Attribute(PACKED_RING, "part"),
        Attribute("keys", "whole ring", 0, 2),
        Attribute("values", "whole ring", 0, 2),
    ),
    "DummyLayer": (),
}


class CrossAttentionLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K and V of images, in a cache whose other layers hold those of tokens."""

    def crop(self, tokens_to_remove: int) -> None:
        """Keep the images, which stand for no token at the end."""


@dataclass(frozen=True)
class Record:
    """One tensor of a layer; `state`: its number where the attribute is a dict."""

    layer: Any
    attribute: Attribute
    state: int | None
    tensor: Tensor

    @property
    def name(self) -> str:
        """The attribute, with the number of the state."""
        return self.attribute.name + ("" if self.state is None else f".{self.state}")

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.tensor.shape[self.attribute.rows]

    def with_rows(self, rows: Tensor) -> Tensor:
        """Return the tensor with these rows, in this order."""
        return self.tensor.index_select(self.attribute.rows, rows.to(self.tensor.device))

    def put(self, tensor: Tensor) -> None:
        """Let the layer hold another tensor."""
        if self.state is None:
            setattr(self.layer, self.attribute.name, tensor)
        else:
            states = getattr(self.layer, self.attribute.name)
            states[list(states)[self.state]] = tensor


def attributes_of(layer: Any) -> tuple[Attribute, ...]:
    """Return where a layer holds its records. Raises `KVPactError` for a class not in `RECORDS`."""
    kind = type(layer).__name__
    if kind not in RECORDS:
        raise KVPactError(
            f"kvpact does not know what transformers' {kind} holds, so it could lose a part of it; "
            "use transformers' DynamicCache for this model"
        )
    return RECORDS[kind]


def records_of(layer: Any, *, whole: bool = False) -> list[Record]:
    """Return a layer's tensors, streams `whole` or in parts; raises `KVPactError` if unknown."""
    attributes, found = attributes_of(layer), []
    known = {attribute.name for attribute in attributes}
    for name, value in vars(layer).items():
        tensors = value.values() if isinstance(value, dict) else (value,)
        if name[0] != "_" and name not in known and any(isinstance(x, Tensor) for x in tensors):
            raise KVPactError(
                f"transformers' {type(layer).__name__} holds {name!r}, which kvpact does not know"
            )
    for attribute in attributes:
        if attribute.kind.partition(" ")[0] == ("part" if whole else "whole"):
            continue
        value = getattr(layer, attribute.name)
        parts = enumerate(value.values()) if isinstance(value, dict) else [(None, value)]
        found += [
            Record(layer, attribute, state, tensor)
            for state, tensor in parts
            if tensor is not None and tensor.numel()
        ]
    if whole and found and isinstance(layer, CrossAttentionLayer):
        raise KVPactError(
            "prefixes are named by token ids, which do not tell the images that this model has "
            "seen: take snapshot(), or store the prefixes of texts alone"
        )
    return found


def check_removable(layers: Sequence[Any], count: int) -> None:
    """Raise `KVPactError` unless all layers can forget their last `count` tokens."""
    for layer in layers:
        recording, why = getattr(layer, "record_past", False), ""
        if isinstance(layer, CrossAttentionLayer):
            continue
        packed = isinstance(layer, CompressedSlidingLayer)
        kinds = set() if packed else {record.attribute.name for record in records_of(layer)}
        if isinstance(layer, EntriesLayer) and layer.cumulative_length:
            why = "an entry stands for several tokens"
        elif "recurrent_states" in kinds:
            why = "the state of linear attention stands for all tokens"
        elif "conv_states" in kinds and not recording:
            why = "the state of a convolution has the last tokens alone"
        elif packed:
            why = layer.lost(count)
        elif "keys" in kinds and not recording and layer.get_seq_length() >= layer.sliding_window:
            why = f"tokens before the window of {layer.sliding_window} are no longer held"
        if why:
            raise KVPactError(
                f"the last {count} tokens can't be removed from a {type(layer).__name__}: {why}; "
                "begin again with reset(), or from a copy.deepcopy of the cache made before"
            )


def forget(layer: Any) -> None:
    """Forget all that a layer holds, and its shape, which transformers' linear layers keep."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recording = layer.record_past
        LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
        layer.record_past = recording
    versions.forget(layer)


def tokens_held(layers: Mapping[int, Any], counts: set[int]) -> int:
    """Return how many tokens layers and `counts` hold; raises `SnapshotError` if unlike."""
    for layer in layers.values():
        if hasattr(layer, "cumulative_length") and layer.is_initialized:
            counts.add(layer.get_seq_length())
        if isinstance(layer, CompressedIndexedLayer | EntriesLayer):
            counts |= layer.index_lengths()
    if len(counts) > 1:
        raise SnapshotError(
            f"layers hold {' and '.join(map(str, sorted(counts)))} tokens: a call of the model was "
            "interrupted. Begin again with reset(), or from a copy.deepcopy made before"
        )
    return counts.pop()


def saved(layers: Mapping[int, Any], tokens: int, *, whole: bool = False) -> list[RecordState]:
    """Return copies of what layers hold of so many tokens; `whole` as of `records_of`."""
    found = []
    for index, layer in layers.items():
        for record in records_of(layer, whole=whole):
            tensor, name = record.tensor.detach(), record.attribute.name
            # Layers that record the past for a rollback have more than the next token needs.
            if record.attribute.kind == "ring":
                tensor = tensor[:, :, -layer.sliding_window + 1 :]
            elif name == "conv_states":
                tensor = tensor[..., -layer.conv_kernel_size[record.state] :]
            tensor = tensor.to("cpu", copy=True).contiguous()
            found.append(RecordState(index, record.name, tensor, record.attribute.rows, tokens))
    return found


def record_shapes(layers: Mapping[int, Any]) -> list[RecordShape]:
    """Return shapes and dtypes of the records of layers that hold some tokens."""
    found = []
    for index, layer in layers.items():
        for record in records_of(layer, whole=True):
            kind, rows, tokens = record.attribute[1:]
            shape = list(record.tensor.shape)
            shape[rows] = 1
            if tokens is not None:
                shape[tokens] = 0
            elif record.attribute.name == "conv_states":
                shape[-1] = layer.conv_kernel_size[record.state]
            kept = layer.sliding_window - 1 if kind.endswith("ring") else None
            axes = tuple(shape), rows, tokens, kept, kind.endswith(("ring", "whole"))
            found.append(RecordShape(index, record.name, record.tensor.dtype, *axes))
    return found


def checked(
    layers: Mapping[int, Any], records: Sequence[RecordState], tokens: int, device: Any
) -> list[RecordState]:
    """Return a snapshot's records on a device; `GeometryError` unless they fit layers, `tokens`."""
    found: dict[int, set[str]] = {}
    for record in records:
        name, _, state = record.name.partition(".")
        layer: Any = layers.get(record.layer)
        known = {} if layer is None else {x.name: x for x in attributes_of(layer)}
        fits = name in known and record.rows == known[name].rows and record.tokens == tokens
        if fits and known[name].kind == "state":
            fits = state.isdigit() and int(state) < len(getattr(layer, name))
        elif fits and known[name].kind in ("part", "fixed"):
            fits = not state
        elif fits:
            axis, shape = known[name].tokens, record.tensor.shape
            kept = min(tokens, getattr(layer, "sliding_window", tokens + 1) - 1)
            fits = not state and axis is not None and len(shape) > axis and shape[axis] == kept
        if not fits:
            raise GeometryError(
                f"the snapshot has {record.name} of layer {record.layer}, "
                f"{list(record.tensor.shape)}, which this model's layer does not hold"
            )
        found.setdefault(record.layer, set()).add(name)
    indexed = tokens and any(isinstance(x, CompressedIndexedLayer) for x in layers.values())
    if indexed and not {x.name for x in records} & {"index_tail", "indexer_keys"}:
        raise GeometryError("the snapshot has no index, by which layers choose their tokens")
    for index, layer in layers.items():
        names = {x.name for x in attributes_of(layer) if x.kind != "fixed"}
        held = found.get(index, set())
        lacks = {x for x in names if x in ("keys", "values")} - held
        lacks |= {"states"} if "conv_states" in names and not held - {"keys", "values"} else set()
        if isinstance(layer, CompressedIndexedLayer | EntriesLayer):
            layer.check_parts({x.name: x.tensor for x in records if x.layer == index}, tokens)
        if lacks:
            raise GeometryError(
                f"the snapshot lacks {' and '.join(sorted(lacks))} of the model's layer {index}, a "
                f"{type(layer).__name__}"
            )
    return [replace(record, tensor=record.tensor.to(device)) for record in records]


def restore_records(layers: Mapping[int, Any], records: Sequence[RecordState]) -> None:
    """Let layers hold `checked` records, and nothing else."""
    for layer in layers.values():
        forget(layer)
    for record in records:
        layer, tensor = layers[record.layer], record.tensor
        name, _, state = record.name.partition(".")
        if name != "recurrent_states":  # their dtype may be another
            layer.dtype, layer.device = tensor.dtype, tensor.device
        if state:
            Record(layer, Attribute(name, "state"), int(state), tensor).put(tensor)
            if not isinstance(layer, EntriesLayer):
                getattr(layer, f"is_{name}_initialized")[int(state)] = True
            if name == "conv_states":
                layer.has_previous_state[int(state)] = True
                layer.conv_kernel_size[int(state)] = tensor.shape[-1]
        else:
            setattr(layer, name, tensor)
            if name in ("keys", "values"):
                layer.is_initialized = True
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = record.tokens
                window = getattr(layer, "_sliding_window_tensor", None)  # from 5.0 on
                layer._sliding_window_tensor = None if window is None else window.to(tensor.device)
            if isinstance(layer, EntriesLayer):
                layer.stand_at(record.tokens)


def let_prompt_go(layer: Any) -> None:
    """Hold a ring's tokens in memory of their own: transformers' are views of a whole prompt."""
    for name in ("keys", "values"):
        x = getattr(layer, name)
        if x.untyped_storage().nbytes() >= 2 * x.nbytes:
            setattr(layer, name, x.clone(memory_format=torch.contiguous_format))
