"""A layer's step in a few launches that are the same each time: what a CUDA graph can replay.

It stands for the calls that define it: `attend_triton`, the encoders' `write`, and the copy of the
new tokens behind the tail. Counts and addresses stand on the device and advance there; the host
sends them where a layer's tokens have come to lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.alike import AlikeCalls
from kvpact.kernels.base import AttendCall, StepRow, StepTokens, TokenMemory
from kvpact.kernels.triton.attend import Prepared, attend_prepared, prepared
from kvpact.kernels.triton.columns import K_EXACT_FROM, K_TAIL, V_EXACT_FROM, V_TAIL
from kvpact.kernels.triton.encode import (
    check_tokens_at,
    encode_at,
    encode_tokens_at,
    encoded_alone,
)
from kvpact.kernels.triton.encode_slots import EncodeSlots
from kvpact.kernels.triton.forms import LEAST_WIDTH, on_device, power_of_two
from kvpact.kernels.triton.step_kernels import (
    begin_step,
    check_step,
    end_step,
    keep_tokens,
)
from kvpact.kernels.views import StreamView

_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


def covers(call: AttendCall) -> bool:
    """Whether steps like this call can be carried out on the device alone."""
    view, k, v, q, config, _, latent = call
    if view is None or k is None or v is None or latent or config.mask is not None:
        return False
    if config.padding is not None or config.origin is not None or not config.exact_new:
        return False
    if any(x.stride(3) != 1 or x.requires_grad for x in (k, v, q)):
        return False
    pairs = ((k, view.k), (v, view.v))
    return all(x.dtype is side.tail.dtype and side.offset is None for x, side in pairs)


class _At(NamedTuple):
    """Where a layer's tokens stand; the memory of tails by identity."""

    held: int
    k_exact_from: int
    v_exact_from: int
    k_memory: int
    v_memory: int


class TritonStep(AlikeCalls):
    """What stays from one step of a layer to the next.

    Parameters
    ----------
    call : AttendCall
        A call like those to come, which `covers` lets pass; its view is of the slots that they
        read and write.
    good : Tensor
        0-d bool on the device: whether what is held passed its checks.

    Attributes
    ----------
    frozen : bool
        Whether the device alone knows how many tokens are held: while a graph is captured.
    placed : int
        How often counts and addresses were sent; a graph stands as long as this does.
    """

    many = False

    def __init__(self, call: AttendCall, good: Tensor) -> None:
        super().__init__(call)
        assert call.view is not None
        self.good = self._flag = good.clone()
        self.frozen = False
        self._call, self._view = call, call.view
        self.placed = 0
        self._slots: list[EncodeSlots] = []
        self._known: Prepared | None = None
        assert call.k is not None and call.v is not None
        self._loose = (call.k.data_ptr() | call.v.data_ptr()) % 16 > 0
        self._at: _At | None = None

    @property
    def replayable(self) -> bool:
        """Whether a step that packs no group of tokens is the same launches each time."""
        codecs = (self._view.k.codec, self._view.v.codec)
        return all(codec.group > 1 or encoded_alone(codec) for codec in codecs)

    def run(self, rows: Sequence[StepRow], k: Tensor, v: Tensor, q: Tensor) -> Tensor | None:
        """Check, attend, keep and encode new tokens; see `StepRunner`.

        Rows of many sequences are left to the ordinary way, and so are tokens that lie less
        aligned than those before.
        """
        if len(rows) != 1 or ((k.data_ptr() | v.data_ptr()) % 16 and not self._loose):
            return None
        with on_device(q.device):
            return self._run(rows[0], k, v, q)

    def _run(self, row: StepRow, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        _, held, k_tokens, v_tokens = row
        if not self.frozen:
            ends = [(tokens.exact_from, tokens.memory) for tokens in (k_tokens, v_tokens)]
            self.place(held, *ends)
        assert self._known is not None
        batch, heads, new, _ = k.shape
        table, size = self._known.rows.table, k.element_size()
        strides = (*k.stride()[:3], *v.stride()[:3])
        begin_step[(batch,)](table, k, v, *strides, size, num_warps=1)
        self._check(k, v, q)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        attend_prepared(self._known, [self._call._replace(k=k, v=v, q=q)], out)
        for side, x, tokens, slots, place in (
            (self._view.k, k, k_tokens, self._slots[0], (K_TAIL.value, K_EXACT_FROM.value)),
            (self._view.v, v, v_tokens, self._slots[1], (V_TAIL.value, V_EXACT_FROM.value)),
        ):
            if tokens.keep:
                width = max(power_of_two(x.shape[3]), LEAST_WIDTH)
                keep_tokens[(new, heads, batch)](
                    table, x, *x.stride()[:3], *place, x.shape[3], width, num_warps=1
                )
            self._encode(side, x, tokens, slots, table)
        sides = (self._view.k, self._view.v)
        windows = [count for side in sides for count in (side.window, side.codec.group)]
        fast = self._known.fast is not None
        end_step[(batch,)](table, new, *windows, fast, num_warps=1)
        if not self.frozen:
            self.count(new)
        return out

    def place(self, held: int, k: tuple[int, TokenMemory], v: tuple[int, TokenMemory]) -> None:
        """Send counts and addresses, unless the device has them.

        Parameters
        ----------
        held : int
            Tokens held.
        k, v : (int, TokenMemory)
            Where exact tokens begin, and where they lie.
        """
        now = _At(held, k[0], v[0], id(k[1]), id(v[1]))
        if now == self._at:
            return
        view = self._view
        view = view._replace(k=_moved(view.k, *k, held), v=_moved(view.v, *v, held))
        call = self._call._replace(view=view)
        self._known = prepared([call], [0])
        if not self._slots:
            sides = (view.k, view.v)
            self._slots = [EncodeSlots.of(side.codec, side.source, call.q) for side in sides]
        self._memory, self._at = (k[1], v[1]), now
        self.placed += 1

    def forget(self) -> None:
        """Send counts and addresses again next time: the device has counted what was taken back."""
        self._at = None

    def count(self, new: int) -> None:
        """Know where tokens stand after a step, as `end_step` does on the device."""
        assert self._at is not None
        held = self._at.held + new
        ends = []
        for side, before in (
            (self._view.k, self._at.k_exact_from),
            (self._view.v, self._at.v_exact_from),
        ):
            packed = held - held % side.codec.group
            ends.append(max(before, min(packed, max(held - side.window, 0))))
        self._at = self._at._replace(held=held, k_exact_from=ends[0], v_exact_from=ends[1])

    def _encode(
        self, side: StreamView, x: Tensor, tokens: StepTokens, slots: EncodeSlots, table: Tensor
    ) -> None:
        if side.codec.group == 1 and encoded_alone(side.codec):
            encode_tokens_at(side.codec, x, slots, table)
        elif tokens.encoded:
            if self.frozen:
                raise KernelError("a step that packs a group of tokens can't be captured")
            given = x
            if tokens.inside:
                given = tokens.memory.tokens(tokens.start, tokens.start + tokens.encoded)
            encode_at(side.codec, given, slots, tokens.start)

    def _check(self, k: Tensor, v: Tensor, q: Tensor) -> None:
        """Let the flag on the device tell of tokens that can't be stored."""
        for side, x in ((self._view.k, k), (self._view.v, v)):
            check_tokens_at(side.codec, x, self._flag)
        sides = (self._view.k.codec, self._view.v.codec)
        most = [number for codec in sides for number in (codec.max_abs, codec.max_norm)]
        dims = [x.shape[3] for x in (k, v, q)]
        strides = [step for x in (k, v, q) for step in x.stride()[:3]]
        check_step[(k.shape[2], q.shape[1], k.shape[0])](
            k, v, q, self._flag.view(torch.int8), *strides, k.shape[1], *most, *dims,
            *[max(power_of_two(dim), LEAST_WIDTH) for dim in dims], **_ONE_WARP,
        )  # fmt: skip


def _moved(side: StreamView, exact_from: int, memory: TokenMemory, held: int) -> StreamView:
    """Return a view of a stream as it is before a step."""
    return side._replace(exact_from=exact_from, tail=memory.tokens(exact_from, held))
