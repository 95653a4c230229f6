"""A layer's step in a few launches that are the same each time, which a CUDA graph can replay.

It stands for the calls that define it: `attend_triton`, the encoders' `write`, and the copy of the
new tokens after the tail. Counts and addresses stand on the device and advance there; the host
sends them where a layer's tokens have come to lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.errors import KernelError
from kvpact.kernels.base import AttendCall, StepRow, StepRunner, StepTokens, TokenMemory, can_step
from kvpact.kernels.sources import SegmentSource
from kvpact.kernels.triton.attend.attend import Prepared, attend_prepared, prepared
from kvpact.kernels.triton.columns import K_SIDE, V_SIDE, SideColumns
from kvpact.kernels.triton.encode import encoder
from kvpact.kernels.triton.forms import SlotPlaces, on_device, slots_of, width_of
from kvpact.kernels.triton.step.kernels import Counting, Taking, take_tokens
from kvpact.kernels.views import WAITING, StreamView, exact_from
from kvpact.methods import Codec
from kvpact.snapshot.pages import sent


def covers(call: AttendCall) -> bool:
    """Return whether steps like this call can be carried out on the device alone."""
    if call.latent or not can_step(call):
        return False
    assert call.view is not None
    sides = call.view.k, call.view.v
    device = call.q.device
    return all(s.offset is None and not slots_of(s.codec, device).encode_reason for s in sides)


class Taker(NamedTuple):
    """A stream that takes tokens. `codec`: that a kernel encodes for."""

    codec: Codec
    slots: SlotPlaces
    taking: Taking


def taking_of(codec: Codec, x: Tensor, side: SideColumns, wait: bool = False) -> Taking:
    """Return how a stream takes tokens like `x`; those that `wait` are encoded when they leave."""
    form = slots_of(codec, x.device).known
    alone = codec.group == 1  # as they come, no groups of them
    encodes = alone and form.trellis is None and not wait
    new = x.shape[2]
    rows = encoder.rows_of(form, new)
    span = encoder.span_of(form, new) if encodes else rows
    most, longest = codec.max_abs, codec.max_norm
    if wait and alone:
        most = min(most, form.limit)
    return Taking(form, side, encodes, most, longest, rows, span, x.element_size())


Flag = tuple[int, bool, bool]
"""The flags of a row, or of all of them, for `take`: the address of a 0-d bool that becomes False
where a number of its tokens or queries can't be stored; whether K's tokens, and V's, are copied
after the tail."""


def sent_flags(flags: Sequence[Flag], device: torch.device) -> Tensor:
    """Return flags on the device, `[len(flags), 3]` int64."""
    return sent(torch.tensor(flags, dtype=torch.int64, device="cpu"), device)


def take(
    table: Tensor, flags: Tensor, sides: Sequence[Taker], k: Tensor, v: Tensor, q: Tensor
) -> None:
    """Take the tokens of a step, after those that each row holds: the device alone knows.

    Tokens of groups and of trellises are encoded by others. `flags`: of `sent_flags`, one for each
    row or one for all. The last axes of `k`, `v` and `q` have no gaps.
    """
    batch, heads, new, _ = k.shape
    how = [side.taking for side in sides]
    spans = max((new + one.span - 2) // one.span + 1 for one in how)
    where: list[Tensor | int] = []
    for codec, slots, _ in sides:
        tables = slots_of(codec, k.device)
        where += [slots.table, slots.heads, tables.signs, tables.boundaries, tables.levels]
        where += [slots.tiles, slots.segments]
    strides = [step for x in (k, v, q) for step in x.stride()[:3]]
    take_tokens[spans, 3 * heads, batch](
        table, flags, flags.stride(0) if len(flags) > 1 else 0, k, v, q, *strides, *where,
        new, q.shape[2], heads, q.shape[1] // heads, batch,
        *how, q.shape[3], width_of(q.shape[3]),
        num_warps=max(encoder.warps_of(one.form, new) for one in how),
        maxnreg=255, enable_fp_fusion=False, num_stages=1,
    )  # fmt: skip


End = tuple[int, TokenMemory]  # the first of a stream's exact tokens, and their addresses


class _At(NamedTuple):
    """The places of a row's tokens, with the identities of the tensors that they lie in."""

    held: int
    k_exact_from: int
    v_exact_from: int
    k_memory: int
    v_memory: int
    k_slots: int
    v_slots: int


class TritonStep(StepRunner):
    """Per-layer constants of repeated decode steps like `call`, which `covers` lets pass."""

    def __init__(self, call: AttendCall, good: Tensor) -> None:
        super().__init__(call)
        assert call.view is not None and call.k is not None and call.v is not None
        self.good = self._good = good  # 0-d bool: False where a number of a step can't be stored
        self.frozen = False  # while a graph is captured the device alone knows what is held
        self.placed = 0  # how often counts, addresses or flags were sent; a graph stands till then
        self._call, self._view = call, call.view
        self._codecs = (call.view.k.codec, call.view.v.codec)
        self._windows = (call.view.k.window, call.view.v.window)
        self._loose = (call.k.data_ptr() | call.v.data_ptr()) % 16 > 0
        self._taking = (
            taking_of(self._codecs[0], call.k, K_SIDE, self._windows[0] == WAITING),
            taking_of(self._codecs[1], call.v, V_SIDE, self._windows[1] == WAITING),
        )
        # Of the rows that this one leads.
        self._at: list[_At] = []
        self._memory: list[TokenMemory] = []
        self._sources: list[tuple[SegmentSource, SegmentSource]] = []
        self._slots: list[SlotPlaces] = []
        self._known: Prepared | None = None
        self._flags: tuple[list[Flag], Tensor] | None = None

    def matches(self, other: object) -> bool:
        """Return whether two are for the same calls, but for their slots."""
        if self is other:
            return True
        if not isinstance(other, TritonStep) or not super().matches(other):
            return False
        # Kernels are launched with the codecs of the first row.
        pairs = zip(self._codecs, other._codecs, strict=True)
        return self._windows == other._windows and all(a is b for a, b in pairs)

    def run(self, rows: Sequence[StepRow], k: Tensor, v: Tensor, q: Tensor) -> Tensor | None:
        """Check, attend, keep and encode new tokens; None if they lie less aligned than before."""
        runners = [_own(row) for row in rows]
        loose = any(runner._loose for runner in runners)
        if (k.data_ptr() | v.data_ptr()) % 16 and not loose:
            return None
        with on_device(q.device):
            return runners[0]._run(rows, runners, k, v, q)

    def _run(
        self, rows: Sequence[StepRow], runners: list[TritonStep], k: Tensor, v: Tensor, q: Tensor
    ) -> Tensor:
        if not self.frozen:
            self._place([(_own(row), row.held, _end(row.k), _end(row.v)) for row in rows])
        assert self._known is not None
        table = self._known.rows.table
        # Nobody knows where tokens stand if this is interrupted.
        at, self._at = self._at, []
        takers = [
            Taker(*each) for each in zip(self._codecs, self._slots, self._taking, strict=True)
        ]
        keeps = [
            (runner._good.data_ptr(), row.k.keep, row.v.keep)
            for row, runner in zip(rows, runners, strict=True)
        ]
        take(table, self._flags_of(keeps), takers, k, v, q)
        for taker, x in zip(takers, (k, v), strict=True):
            self._encode(taker, x, rows, table)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        counting = Counting(
            k.shape[2],
            self._known.fast is not None,
            *(
                count
                for window, codec in zip(self._windows, self._codecs, strict=True)
                for count in (window, codec.group)
            ),
        )
        attend_prepared(self._known, [self._call._replace(k=k, v=v, q=q)], out, counting)
        self._at = at if self.frozen else self._after(at, k.shape[2])
        return out

    def _flags_of(self, flags: list[Flag]) -> Tensor:
        """Return the flags of rows for `take`, sent where they have changed."""
        if self._flags is None or self._flags[0] != flags:
            self._flags = (flags, sent_flags(flags, self._good.device))
            self.placed += 1
        return self._flags[1]

    def place(self, held: int, k: End, v: End) -> None:
        """Send counts and addresses, unless the device has them."""
        self._place([(self, held, k, v)])

    def _place(self, rows: list[tuple[TritonStep, int, End, End]]) -> None:
        """Send counts and addresses of rows, each with what knows where its slots lie."""
        now = [
            _At(held, k[0], v[0], id(k[1]), id(v[1]), *(id(source) for source in runner.sources))
            for runner, held, k, v in rows
        ]
        if now == self._at:
            return
        self._at = []
        calls = []
        for runner, held, k, v in rows:
            view = runner._view
            view = view._replace(k=_moved(view.k, *k, held), v=_moved(view.v, *v, held))
            calls.append(runner._call._replace(view=view))
        self._known = prepared(calls, range(len(calls)))
        sources = [runner.sources for runner, *_ in rows]
        if sources != self._sources:
            batch, device = sum(call.q.shape[0] for call in calls), calls[0].q.device
            self._slots = [
                SlotPlaces.of(slots_of(codec, device).known, side, batch, device)
                for codec, side in zip(self._codecs, zip(*sources, strict=True), strict=True)
            ]
        self._memory = [memory for _, _, k, v in rows for memory in (k[1], v[1])]
        self._sources, self._at = sources, now
        self.placed += 1

    def forget(self) -> None:
        """Send counts and addresses again next time: the device has counted what was taken back."""
        self._at = []

    def count(self, new: int) -> None:
        """Know where tokens stand after a step that the device carried out by itself."""
        self._at = self._after(self._at, new)

    def _after(self, rows: list[_At], new: int) -> list[_At]:
        """Return where tokens stand after a step, as `advance` counts on the device."""
        made = []
        for at in rows:
            held = at.held + new
            ends = []
            for window, codec, before in zip(self._windows, self._codecs, at[1:3], strict=True):
                packed, out = held - held % codec.group, max(held - window, 0)
                ends.append(before if window == WAITING else exact_from(before, packed, out))
            made.append(at._replace(held=held, k_exact_from=ends[0], v_exact_from=ends[1]))
        return made

    def _encode(self, taker: Taker, x: Tensor, rows: Sequence[StepRow], table: Tensor) -> None:
        """Encode what `take` does not: what left the window, whole groups, and trellises."""
        codec, slots, taking = taker
        second = taking.at is V_SIDE
        if codec.group == 1 and self._windows[second] != WAITING:
            if not taking.encodes:
                encoder.encode_trellis(codec, slots_of(codec, x.device).known, x, slots, 0, table)
            return
        for index, row in enumerate(rows):
            tokens = row.v if second else row.k
            if not tokens.encoded:
                continue
            if self.frozen:
                raise KernelError("a step that packs a group of tokens can't be captured")
            given = x if len(rows) == 1 else x[index : index + 1]
            if tokens.inside:
                given = tokens.memory.tokens(tokens.start, tokens.start + tokens.encoded)
            own = slots if len(rows) == 1 else slots.row(index)
            encoder.encode_at(codec, given, own, tokens.start)


def _own(row: StepRow) -> TritonStep:
    """Return a row's runner, which is one of these."""
    assert isinstance(row.runner, TritonStep)
    return row.runner


def _end(tokens: StepTokens) -> End:
    return tokens.exact_from, tokens.memory


def _moved(side: StreamView, exact_from: int, memory: TokenMemory, held: int) -> StreamView:
    """Return a view of a stream as it is before a step."""
    return side._replace(exact_from=exact_from, tail=memory.tokens(exact_from, held))
