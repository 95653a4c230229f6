"""What dispatch may choose to attend with: launches of steps and prompts, taken down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from machine_code import Launch, recorded
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.kernels.base import AttendCall
from kvpact.kernels.sources import Segment, Where
from kvpact.kernels.triton.attend.attend import attend_triton
from kvpact.kernels.views import LayerView, StreamView
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.spec import parse_spec

_CPU = torch.device("cpu")
BITS = (2, 3, 4)
HEADS, TOKENS = 2, 1024
GENERAL = (
    "turboquant:bits=6",
    "none",
    "kivi:bits=4",
    "kivi:bits=2",
    "kvarn:bits=4",
    "kvarn:bits=2",
    "fp8",
    "fp8:format=e5m2,scale=none",
    "fp8/turboquant:bits=2",
    "turboquant:bits=4/fp8",
)
"""Of each kind of slots that the fast kernels do not attend."""
MORE = (
    "turboquant:bits=4,center=64",
    "turboquant:bits=3,center=64",
    "int:bits=4,zero=true",
)
"""What has more to it than levels of 8 bits and scales."""
PLAIN = ",first=false,weights=false,blocks=false,center=0"
"""Options of `trellis` without which keys have blocks of unlike bits, and bases."""
_NAMES = {torch.float16: " fp16", torch.float32: " fp32"}
_MASKS: dict[torch.dtype | None, str] = {torch.bool: " mask", torch.float32: " added mask"}


class SlotsOfZeros:
    """Slots of zeros."""

    def __init__(self, codec: Codec, segment_tokens: int) -> None:
        self.codec, self.segment_tokens = codec, segment_tokens
        self.source, self.prepared = self, dict[str, Any]()
        self.fields = {
            field.name: field.allocate(1, HEADS, segment_tokens, _CPU) for field in codec.fields
        }

    def segment(self, index: int) -> Segment:
        """Return the first segment."""
        return self.fields

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return the field of the first segment."""
        return self.fields[name]

    def where(self, name: str) -> Where:
        """Return where it lies, for all segments."""
        x = self.fields[name]
        segments = np.full(TOKENS // self.segment_tokens, x.data_ptr())
        return Where(segments[None], 0, x.stride(0) * x.itemsize, x.stride(1) * x.itemsize)


class Variant(NamedTuple):
    """Attention over slots of K and V.

    Parameters
    ----------
    spec : str
        Of the slots; "" for none.
    dim, groups, queries : int
        Their width, query heads of a KV head, and queries of each.
    segment_tokens : int
        Tokens of a page.
    softcap : float or None
        Of the logits.
    dtype : torch.dtype
        Of exact tokens and queries.
    mask : torch.dtype or None
        Of a mask.
    rope : int
        Channels of rotated keys beside latents of `dim`; 0 for ordinary keys and values.
    """

    spec: str
    dim: int = 128
    groups: int = 4
    queries: int = 1
    segment_tokens: int = 128
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    mask: torch.dtype | None = None
    rope: int = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        flags = " page=32" * (self.segment_tokens == 32) + " softcap" * (self.softcap is not None)
        flags += _NAMES.get(self.dtype, "") + _MASKS.get(self.mask, "")
        width = f"{self.dim}+{self.rope}" if self.rope else self.dim
        return f"{self.spec or 'exact'} D={width} {self.groups}x{self.queries}{flags}"

    def call(self) -> AttendCall:
        """Return a call with a long past."""
        heads, total = 1 if self.rope else HEADS, 576 + self.queries
        tails = [
            torch.zeros(1, heads, 64, width, dtype=self.dtype, device="cpu")
            for width in (self.dim, self.rope or self.dim)
        ]
        new_k, new_v = (tail[:, :, : self.queries] for tail in tails)
        shape = (1, heads * self.groups, self.queries)
        q = tails[0].new_zeros(*shape, self.dim + self.rope)
        mask = None if self.mask is None else q.new_zeros(*shape, total, dtype=self.mask)
        config = AttendConfig(softcap=self.softcap, mask=mask)
        if not self.spec:
            return AttendCall(None, new_k, new_v, q, config)
        at = torch.arange(4, dtype=torch.int64, device="cpu").unsqueeze(0)
        k, v = (
            StreamView(
                codec := side(self.spec, value, tail.shape[3]),
                SlotsOfZeros(codec, self.segment_tokens),
                512,
                tail,
                tail[:, :, :4],
                at,
                4,
                _nothing,
            )
            for value, tail in zip((False, True), tails, strict=True)
        )
        return AttendCall(LayerView(k, v, None), new_k, new_v, q, config, latent=bool(self.rope))

    def launches(self) -> list[Launch]:
        """Return what is launched to attend."""
        call = self.call()
        with recorded() as made:
            attend_triton([call])
        return made


def _nothing() -> None:
    """Check nothing."""


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
    yield from (Variant(spec) for spec in MORE)
    yield Variant("int:bits=4,zero=true", groups=8)
    for bits in BITS:
        yield Variant(f"trellis:bits={bits}")
        yield Variant(f"trellis:bits={bits}{PLAIN}")
    yield from (Variant(f"trellis:bits={bits}") for bits in (5, 6))
    for groups in (8, 16):
        yield Variant("trellis:bits=4", groups=groups)
    for dim in (64, 256):
        yield Variant("trellis:bits=4", dim)
    yield Variant("trellis:bits=4", softcap=30.0)
    yield Variant(f"trellis:bits=4{PLAIN}", segment_tokens=32)


def others() -> Iterator[Variant]:
    """Iterate over what the general kernel alone attends, and over prompts and chunks."""
    yield from (Variant(spec) for spec in GENERAL)
    for dim in (64, 128, 256):
        yield Variant("turboquant:bits=4", dim, queries=16)
        yield Variant("turboquant:bits=4", dim, queries=64)
        yield Variant("int:bits=8", dim, queries=16)
        yield Variant("int:bits=8", dim, queries=64)
        yield Variant("", dim, queries=16, softcap=30.0)
    for dtype in _NAMES:
        yield Variant("turboquant:bits=4", dtype=dtype)
        yield Variant("turboquant:bits=4", queries=16, dtype=dtype)
    yield Variant("turboquant:bits=4", 96)
    yield from _rules()
    yield from _shapes()
    yield from _latents()


def _rules() -> Iterator[Variant]:
    """Iterate over softcaps, masks and products in fp32."""
    for spec in ("fp8", "none", "trellis:bits=4"):
        yield Variant(spec, softcap=30.0)
        yield Variant(spec, queries=16, softcap=30.0, mask=torch.float32)
        yield Variant(spec, dtype=torch.float32)
    for mask in (torch.bool, torch.float32):
        yield Variant("turboquant:bits=4", mask=mask)
        yield Variant("turboquant:bits=4", queries=16, mask=mask)
    for dim in (128, 256):
        yield Variant("trellis:bits=4", dim, 4, 16, 128, 30.0, torch.float32, torch.float32)


def _shapes() -> Iterator[Variant]:
    """Iterate over widths and numbers of query rows, and over unlike slots of K and V."""
    for spec in ("turboquant:bits=3,center=64", "fp8", "trellis:bits=4"):
        for dim in (64, 96, 256):
            yield Variant(spec, dim)
        for dim in (128, 256):
            yield Variant(spec, dim, queries=8)
            yield Variant(spec, dim, queries=16)
    yield from (Variant("kivi:bits=4", dim) for dim in (64, 256))
    for dim in (512, 1024):
        yield Variant("turboquant:bits=6", dim)
    yield Variant("int:bits=8/turboquant:bits=3")
    yield Variant("kivi:bits=2/trellis:bits=3")
    yield Variant("trellis:bits=4/fp8")


def _latents() -> Iterator[Variant]:
    """Iterate over latents, of whose widths models have the first."""
    for spec in ("turboquant:bits=4", "int:bits=8", "kivi:bits=4/none"):
        yield Variant(spec, 512, groups=16, rope=64)
    yield Variant("turboquant:bits=4", 512, groups=16, softcap=30.0, rope=64)
    yield Variant("turboquant:bits=4", 512, groups=16, dtype=torch.float32, rope=64)
    yield Variant("turboquant:bits=4", 64, groups=16, queries=4, rope=32)


@cache
def side(spec: str, value: bool, dim: int) -> Codec:
    """Return the codec of K, or of V, that has learnt what it learns."""
    spec_of = parse_spec(spec)
    make = spec_of.value.value_codec if value else spec_of.key.key_codec
    codec: Codec = make(dim, torch.bfloat16)
    if codec.learns_from and not codec.ready:
        generator = torch.Generator().manual_seed(0)
        shape = (1, HEADS, codec.learns_from, dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        codec = codec.learn(x, Context())
    return codec
