"""What dispatch may choose: launches of steps, prompts, encoding and decoding, taken down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.kernels.base import AttendCall, Where
from kvpact.kernels.triton.attend import attend_triton
from kvpact.kernels.triton.decode import decode_triton
from kvpact.kernels.triton.encode import TritonEncoder, encode_reason
from kvpact.kernels.triton.machine_code import Launch, recorded
from kvpact.kernels.views import LayerView, StreamView
from kvpact.methods import Codec
from kvpact.spec import parse_spec

_CPU = torch.device("cpu")
BITS = (2, 3, 4)
HEADS, TOKENS = 2, 1024
TRELLIS = "trellis:bits=4,first=false,weights=false,blocks=false"
FORMATS = (
    "turboquant:bits=4",
    "turboquant:bits=6",
    "turboquant:bits=3,center=64",
    "int:bits=8",
    "int:bits=4,zero=true",
    "fp8",
    "kivi:bits=2",
    "kvarn:bits=4",
    TRELLIS,
)
"""One of each kind of slots."""


class _Slots:
    """Slots of zeros."""

    def __init__(self, codec: Codec, segment_tokens: int) -> None:
        self.codec, self.segment_tokens = codec, segment_tokens
        self.source, self.prepared = self, dict[str, Any]()
        self.fields = {
            field.name: field.allocate(1, HEADS, segment_tokens, _CPU) for field in codec.fields
        }

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return the field of the first segment."""
        return self.fields[name]

    def where(self, name: str) -> Where:
        """Return where it lies, for all segments."""
        x = self.fields[name]
        segments = np.full(TOKENS // self.segment_tokens, x.data_ptr())
        return Where(segments, x.stride(0) * x.itemsize, x.stride(1) * x.itemsize)


class Variant(NamedTuple):
    """Attention over slots of K and V.

    Parameters
    ----------
    spec : str
        Of the slots.
    dim, groups, queries : int
        Their width, query heads of a KV head, and queries of each.
    segment_tokens : int
        Tokens of a page.
    softcap : float or None
        Of the logits.
    """

    spec: str
    dim: int = 128
    groups: int = 4
    queries: int = 1
    segment_tokens: int = 128
    softcap: float | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        flags = " page=32" * (self.segment_tokens == 32) + " softcap" * (self.softcap is not None)
        return f"{self.spec} D={self.dim} {self.groups}x{self.queries}{flags}"

    def launches(self) -> list[Launch]:
        """Return what a step launches that has a long past of bf16 tokens."""
        spec, dtype = parse_spec(self.spec), torch.bfloat16
        codecs = (spec.key.key_codec(self.dim, dtype), spec.value.value_codec(self.dim, dtype))
        tail = torch.zeros(1, HEADS, 64, self.dim, dtype=dtype)
        sinks, at = tail[:, :, :4], torch.arange(4).unsqueeze(0)
        k, v = (
            StreamView(
                codec, _Slots(codec, self.segment_tokens), 512, tail, sinks, at, 4, lambda: None
            )
            for codec in codecs
        )
        new = tail[:, :, : self.queries]
        q = torch.zeros(1, HEADS * self.groups, self.queries, self.dim, dtype=dtype)
        config = AttendConfig(softcap=self.softcap)
        with recorded() as made:
            attend_triton([AttendCall(LayerView(k, v, None), new, new, q, config)], "full")
        return made


def steps() -> Iterator[Variant]:
    """Iterate over steps, at widths and numbers of heads that models have."""
    for k, v in itertools.product(BITS, BITS):
        spec = f"turboquant:bits={k}" + ("" if k == v else f"/turboquant:bits={v}")
        yield from (Variant(spec, groups=groups) for groups in ((4, 8, 16) if k == v else (4, 8)))
        if k == v:
            yield Variant(spec, 64)
            yield Variant(spec, 256)
            yield Variant(spec, segment_tokens=32)
            yield Variant(spec, softcap=30.0)
    for bits in (8, 4):
        for group, groups in itertools.product((32, 128), (4, 8)):
            yield Variant(f"int:bits={bits}" + f",group={group}" * (group != 32), groups=groups)
        yield Variant(f"int:bits={bits}", 64)
        yield Variant(f"int:bits={bits}", 256)
    yield Variant("int:bits=8/int:bits=4")


def others() -> Iterator[Variant]:
    """Iterate over what the general kernel alone attends."""
    yield from (
        Variant(spec) for spec in FORMATS if spec not in ("turboquant:bits=4", "int:bits=8")
    )
    yield Variant("turboquant:bits=4", queries=16)
    yield Variant("turboquant:bits=4", queries=64)


def side(spec: str, value: bool, dim: int) -> Codec:
    """Return the codec of K, or of V."""
    method = parse_spec(spec).key
    made: Codec = (method.value_codec if value else method.key_codec)(dim, torch.bfloat16)
    return made


def encoding(spec: str, value: bool, tokens: int, dim: int = 128) -> list[Launch]:
    """Return what is launched to encode bf16 tokens."""
    codec = side(spec, value, dim)
    slots = _Slots(codec, TOKENS)
    with recorded() as made:
        encoder = TritonEncoder(codec)
        x = torch.zeros(1, HEADS, tokens, dim, dtype=torch.bfloat16)
        encoder.write(encoder.prepare(x), [slots.fields], TOKENS, 0)
    return made


def decoding(spec: str, value: bool, dim: int = 128) -> list[Launch]:
    """Return what is launched to decode to bf16."""
    out = torch.zeros(1, HEADS, 64, dim, dtype=torch.bfloat16)
    with recorded() as made:
        decode_triton(_Slots(side(spec, value, dim), TOKENS), 0, 64, out, inverse=True)
    return made


def all_launches() -> Iterator[tuple[str, list[Launch]]]:
    """Iterate over names of the table and what is launched."""
    for variant in (*steps(), *others()):
        yield variant.name, variant.launches()
    for spec, value in itertools.product(FORMATS, (False, True)):
        name = f"{'V' if value else 'K'} {spec}"
        codec = side(spec, value, 128)
        if not encode_reason(codec):
            for tokens in dict.fromkeys((max(codec.group, 64), codec.group)):
                yield f"encode {tokens} {name}", encoding(spec, value, tokens)
        yield f"decode {name}", decoding(spec, value)
