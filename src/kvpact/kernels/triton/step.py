"""A layer's step in a few launches that are the same each time: what a CUDA graph can replay.

It stands for the calls that define it: `attend_triton`, the encoders' `write`, and the copy of the
new tokens behind the tail. Counts and addresses stand on the device and advance there; the host
sends them where a layer's tokens have come to lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.alike import AlikeCalls
from kvpact.kernels.base import AttendCall, StepRow, StepTokens, TokenMemory
from kvpact.kernels.triton.attend import Prepared, attend_prepared, prepared
from kvpact.kernels.triton.encode import encode_at, encode_reason, encoded_alone
from kvpact.kernels.triton.encode_form import tables_of
from kvpact.kernels.triton.encode_slots import EncodeSlots
from kvpact.kernels.triton.encode_trellis import encode_trellis
from kvpact.kernels.triton.forms import on_device
from kvpact.kernels.triton.step_kernels import Counting, Taking
from kvpact.kernels.triton.taking import Taker, addresses, take, taking_of
from kvpact.kernels.views import StreamView


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
    if any(encode_reason(side.codec) for _, side in pairs):
        return False
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
        self.good = good.clone()
        self._flags = addresses([self.good])
        self._taking: dict[tuple[bool, bool], tuple[Taking, Taking]] = {}
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
        table, sides = self._known.rows.table, (self._view.k, self._view.v)
        # Nobody knows where tokens stand if this is interrupted.
        at, self._at = self._at, None
        taking = self._taking_of(k, v, (k_tokens.keep, v_tokens.keep))
        takers = [
            Taker(side.codec, slots, how)
            for side, slots, how in zip(sides, self._slots, taking, strict=True)
        ]
        take(table, self._flags, takers, k, v, q)
        for taker, x, tokens in zip(takers, (k, v), (k_tokens, v_tokens), strict=True):
            self._encode(taker, x, tokens, table)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        counting = Counting(
            k.shape[2],
            self._known.fast is not None,
            *(count for side in sides for count in (side.window, side.codec.group)),
        )
        attend_prepared(self._known, [self._call._replace(k=k, v=v, q=q)], out, counting)
        self._at = at if self.frozen else self._after(at, k.shape[2])
        return out

    def _taking_of(self, k: Tensor, v: Tensor, keep: tuple[bool, bool]) -> tuple[Taking, Taking]:
        found = self._taking.get(keep)
        if found is None:
            found = self._taking[keep] = (
                taking_of(self._view.k.codec, k, False, keep[0]),
                taking_of(self._view.v.codec, v, True, keep[1]),
            )
        return found

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
        """Know where tokens stand after a step that the device carried out by itself."""
        self._at = self._after(self._at, new)

    def _after(self, at: _At | None, new: int) -> _At:
        """Return where tokens stand after a step, as `advance` counts on the device."""
        assert at is not None
        held = at.held + new
        ends = []
        for side, before in (
            (self._view.k, at.k_exact_from),
            (self._view.v, at.v_exact_from),
        ):
            packed = held - held % side.codec.group
            ends.append(max(before, min(packed, max(held - side.window, 0))))
        return at._replace(held=held, k_exact_from=ends[0], v_exact_from=ends[1])

    def _encode(self, taker: Taker, x: Tensor, tokens: StepTokens, table: Tensor) -> None:
        """Encode what `take` does not: groups that are whole now, and trellises."""
        codec, slots, taking = taker
        if encoded_alone(codec):
            if not taking.encodes:
                encode_trellis(codec, tables_of(codec, x.device).form, x, slots, 0, table)
        elif tokens.encoded:
            if self.frozen:
                raise KernelError("a step that packs a group of tokens can't be captured")
            given = x
            if tokens.inside:
                given = tokens.memory.tokens(tokens.start, tokens.start + tokens.encoded)
            encode_at(codec, given, slots, tokens.start)


def _moved(side: StreamView, exact_from: int, memory: TokenMemory, held: int) -> StreamView:
    """Return a view of a stream as it is before a step."""
    return side._replace(exact_from=exact_from, tail=memory.tokens(exact_from, held))
