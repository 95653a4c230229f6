"""Backends: code that attends over slots, encodes tokens into them and decodes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import DtypeError, GeometryError
from kvpact.kernels.prompt import PromptRunner, PromptSide
from kvpact.kernels.sources import Pick, SegmentSource, WritableSource, copy_slots
from kvpact.kernels.views import LayerView
from kvpact.methods import Codec
from kvpact.methods.context import Context

Prepared = Tensor | dict[str, Tensor]
"""Tokens that can't fail any more, or arrays by field name: what most encoders write."""
Operation = Literal["attend", "encode", "decode", "learn"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of exact tokens that compiled kernels read and write."""
OPERATIONS: tuple[Operation, ...] = ("attend", "encode", "decode")
"""On slots. Who encodes a stream also learns for it, or else torch does."""


class AttendCall(NamedTuple):
    """One call of attention: a batch whose rows have equal length.

    - `view`: the tokens held; None for an empty layer.
    - `k`, `v`: new tokens `[B, H_kv, new, D]`, attended as given; None where they are in the view.
      Over latents `c_kv` `[B, 1, new, r]` and `k_rope` `[B, 1, new, d_rope]`.
    - `q`: `[B, H_q, q_len, D]`, of the last `q_len` tokens; over latents `[B, H, q_len, r +
      d_rope]`.
    """

    view: LayerView | None
    k: Tensor | None
    v: Tensor | None
    q: Tensor
    config: AttendConfig
    padding: Tensor | None = None
    latent: bool = False

    @property
    def new(self) -> int:
        """New tokens."""
        return 0 if self.k is None else self.k.shape[2]

    @property
    def held(self) -> int:
        """Tokens held before the new ones."""
        return 0 if self.view is None else self.view.length

    @property
    def kv_heads(self) -> int:
        """KV heads; 1 over latents."""
        return self._like("k").shape[1]

    @property
    def query_rows(self) -> int:
        """Rows of queries of a KV head."""
        return self.q.shape[1] // self.kv_heads * self.q.shape[2]

    @property
    def scale(self) -> float:
        """The factor on logits."""
        scale = self.config.softmax_scale
        return self.q.shape[3] ** -0.5 if scale is None else scale

    @property
    def output_dim(self) -> int:
        """Width of the output: that of the values, or of the latents."""
        return self._like("k" if self.latent else "v").shape[3]

    def _like(self, side: str) -> Tensor:
        new: Tensor | None = self.k if side == "k" else self.v
        if new is not None:
            return new
        assert self.view is not None, "a call needs new tokens or a view"
        tail: Tensor = getattr(self.view, side).tail
        return tail


class TokenMemory:
    """Memory `[B, H, n, D]` of consecutive exact tokens, with room after those that are there.

    What lies where never changes, so it is asked once: a step only counts.
    """

    __slots__ = ("dense", "head", "origin", "row", "start", "tensor", "token")

    def __init__(self, tensor: Tensor, start: int) -> None:
        self.tensor, self.start = tensor, start
        size, (row, head, token, channel) = tensor.itemsize, tensor.stride()
        self.row, self.head, self.token = row * size, head * size, token * size
        self.dense = channel == 1 or tensor.shape[3] == 1
        # Where the token of position 0 would lie, had it been kept.
        self.origin = tensor.data_ptr() - start * self.token

    def __reduce__(self) -> tuple[type[TokenMemory], tuple[Tensor, int]]:
        """Let a copy ask where its own tensor lies."""
        return TokenMemory, (self.tensor, self.start)

    def tokens(self, start: int, end: int) -> Tensor:
        """Return the tokens of positions `start <= t < end`, `[B, H, end - start, D]`."""
        if start == end:
            return self.tensor[:, :, :0] if self.tensor.shape[2] else self.tensor
        return self.tensor[:, :, start - self.start : end - self.start]


class StepTokens(NamedTuple):
    """The part of one stream in a step: tokens from `exact_from` on are exact.

    `keep`: new tokens are copied after them; `encoded` tokens from `start` on are packed, which lie
    `inside` of `memory`, or are the new ones.
    """

    exact_from: int
    memory: TokenMemory
    keep: bool
    start: int
    encoded: int
    inside: bool


QKV = tuple[Tensor, Tensor, Tensor]


class StepRunner(ABC):
    """Carries out steps of one layer at once; made for calls like `call`, over its slots.

    `good`: 0-d bool that steps make False where a deferred check fails; None: checks are made at
    once.
    """

    good: Tensor | None = None

    def __init__(self, call: AttendCall) -> None:
        assert call.view is not None and call.k is not None and call.v is not None
        self.config = call.config
        self.sources: tuple[SegmentSource, SegmentSource]
        self.sources = (call.view.k.source, call.view.v.source)
        device = call.q.get_device()
        self._like = [
            (x.shape, x.stride(), x.dtype, device, False) for x in (call.k, call.v, call.q)
        ]
        # How far rows lie apart is looked up at each step.
        self._row_like = [(shape[1:], stride[1:], *more) for shape, stride, *more in self._like]

    def fits(
        self, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig, rows: int | None = None
    ) -> bool:
        """Return whether a call (with `rows`, each row) has the shapes that this was made for."""
        if config is not self.config and not self.takes(config):
            return False
        if not type(k) is type(v) is type(q) is Tensor:
            return False
        try:
            found = [
                (x.shape, x.stride(), x.dtype, x.get_device(), x.requires_grad) for x in (k, v, q)
            ]
        except RuntimeError:  # sparse and nested ones have none; the ordinary way names them
            return False
        if rows is None:
            return found == self._like
        each = [(shape[1:], stride[1:], *more) for shape, stride, *more in found]
        return each == self._row_like and len(k) == len(v) == len(q) == rows

    def takes(self, config: AttendConfig) -> bool:
        """Return whether a config is the one that this was made for."""
        return config is self.config or _equal(config, self.config)

    def matches(self, other: object) -> bool:
        """Return whether both were made for the same calls, but for their slots."""
        if self is other:
            return True
        if not isinstance(other, type(self)) or self._row_like != other._row_like:
            return False
        return self.takes(other.config)

    def over(self, view: LayerView) -> Self | None:
        """Return a runner over another layer's slots; None where a new one is as quick."""
        return None

    def first(self, at: slice, k: StepTokens, v: StepTokens, qkv: QKV, out: Tensor) -> bool:
        """Do as `run` with the tokens `at`, of any number, one row without a past; False: it can't.

        `[T, heads, D]` each; what is kept is all from the memory's start on.
        """
        return False

    @abstractmethod
    def run(self, rows: Sequence[StepRow], k: Tensor, v: Tensor, q: Tensor) -> Tensor | None:
        """Check, attend, encode and keep new tokens: all of them, or none; return the output.

        `rows`: one for the whole batch, or for each row. None, and nothing is written, where a
        number is NaN, infinite or beyond what is surely stored: the ordinary way then decides, and
        names it.
        """


def _equal(a: AttendConfig, b: AttendConfig) -> bool:
    """Return whether configs are equal and without tensors."""
    tensors = (x for c in (a, b) for x in (c.mask, c.padding, c.sink_logits, c.origin))
    return all(x is None for x in tensors) and a == b


def can_step(call: AttendCall) -> bool:
    """Return whether such calls can be steps: plain rules, and tokens as the tail has them."""
    view, k, v, q, config, _, _ = call
    if view is None or k is None or v is None or config.mask is not None:
        return False
    if config.padding is not None or config.origin is not None or not config.exact_new:
        return False
    if any(x.stride(3) != 1 or x.requires_grad for x in (k, v, q)):
        return False
    return k.dtype is view.k.tail.dtype and v.dtype is view.v.tail.dtype


class StepRow(NamedTuple):
    """A layer's step: its runner, the tokens held, and how K and V take the new ones."""

    runner: StepRunner
    held: int
    k: StepTokens
    v: StepTokens


class Encoder(Protocol):
    """Encodes the tokens of one stream into its slots; not for two threads at once."""

    def prepare(self, x: Tensor, size: float | None = None) -> Any:
        """Do all that can refuse whole groups, no larger than `size`. Raises `NonFiniteError`."""

    def write(self, prepared: Any, source: WritableSource, start: int) -> None:
        """Write what `prepare` returned from the token `start` on; the slots are zero before."""


def check_out(out: Tensor, start: int, end: int, dim: int) -> None:
    """Check what tokens are decoded into: `[B, H, end - start, dim]`, channels side by side."""
    if out.dim() != 4 or not 0 <= start <= end or out.shape[2] != end - start:
        raise GeometryError(f"out has shape {tuple(out.shape)}, not [B, H, {end - start}, D]")
    if out.dtype not in DTYPES:
        raise DtypeError(f"out is {out.dtype}; numbers are decoded to fp32, fp16 or bf16")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise GeometryError("the last axis of out has gaps")
    if dim != out.shape[3]:
        raise GeometryError(f"out is {out.shape[3]} wide, vectors are {dim}")


class SlotReader(Protocol):
    """The slots that `Backend.decode` reads: a `StreamView` is one."""

    @property
    def codec(self) -> Codec:
        """Decodes the slots."""

    @property
    def source(self) -> SegmentSource:
        """The slots."""


class Backend(Protocol):
    """One implementation of the operations; it holds no state of any cache.

    What inherits this covers offsets, latents and new tokens, has nothing to remark, steps nothing
    at once, and learns as torch does, unless it says otherwise.
    """

    name: str
    kind: str
    """Type of the devices that it is for (``cpu``, ``cuda``); "" for all."""

    def describe(self) -> str:
        """Return what the backend is, in a few words, where it runs."""

    def runs_here(self, device: torch.device) -> str:
        """Return why the backend can't compute on a device in this process; "" if it can."""

    def covers(self, operation: Operation, codec: Codec, dtype: torch.dtype) -> str:
        """Return why an operation on slots of this codec is not there; "" if it is."""

    def covers_offset(self) -> str:
        """Return why attention whose packed logits lack `q · R_t b` is not there; "" if it is."""
        return ""

    def covers_latents(self, codec: Codec) -> str:
        """Return why attention over latents in slots of this codec is not there; "" if it is."""
        return ""

    def remark(self, k: Codec, v: Codec) -> str:
        """Return why a slower kernel than others here attends over K and V; "" if none does."""
        return ""

    def covers_new(self, dim: int, dtype: torch.dtype) -> str:
        """Return why attention without a past is not there, up to `dim` channels; "" if it is."""
        return ""

    def attend(self, calls: Sequence[AttendCall]) -> Tensor:
        """Attend in checked calls like one another: `[sum of B, H_q, q_len, D_v]` in q's dtype.

        Where levels are whole numbers of 8 bits, the other factor may be rounded to 16 bits: the
        difference from the torch body stays below 5e-4 of the output's norm. A query that sees no
        token gets zeros.
        """

    def copy_slots(self, source: SegmentSource, pick: Pick, out: Tensor) -> None:
        """Copy items of slots, which lie apart, into storage of zeros, where they lie together."""
        copy_slots(source, pick, out)

    def step(self, call: AttendCall, good: Tensor | None = None) -> StepRunner | None:
        """Return a runner of steps like `call`, over its slots; `good`: of deferred checks."""
        return None

    def prompt(
        self,
        codecs: tuple[Codec, Codec],
        sides: tuple[PromptSide, PromptSide],
        q: Tensor | None,
        seen: tuple[int, int],
    ) -> PromptRunner | None:
        """Return a runner that stores such first tokens at once; K may learn from queries."""
        return None

    def encoder(self, codec: Codec) -> Encoder:
        """Return an encoder for one stream."""

    def learn(self, codec: Codec, x: Tensor, context: Context) -> Codec:
        """Return a codec that learnt from a cache's first tokens. Raises `NonFiniteError`."""
        return codec.learn(x.to(torch.float32), context)

    def decode(
        self, slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool
    ) -> None:
        """Decode packed tokens to `out`, `[B, H, end - start, D]`; without `inverse` transformed.

        What is beyond fp16 becomes its largest number.
        """
