"""The last tokens of each sequence, exactly, outside the engine's pages.

A window is known by the page that holds its last token: nobody but the sequence writes there, and
who finds that page in the engine's prefix cache has the same tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.stream.advance import advance
from kvpact.kernels import TokenMemory

_CPU = torch.device("cpu")
SLACK = 16  # tokens of room after a window; when they are used up, it is moved to the front


class Row(NamedTuple):
    """A sequence's part of a batch, `held` tokens before it, and as many `pages` as all need."""

    start: int
    end: int
    held: int
    pages: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the sequence, the new ones included."""
        return self.held + self.end - self.start


def waves(rows: Sequence[Row], page_tokens: int) -> list[list[Row]]:
    """Return the rows of a batch in parts; each part reads tokens that earlier ones stored."""
    parts, left = [], list(rows)
    # vLLM offers a page to others once the tokens that fill it are scheduled, also in a batch.
    while left:
        filled = {
            page
            for row in left
            for page in row.pages[row.held // page_tokens : row.length // page_tokens]
        }
        # Only whole pages are shared. A sequence that reads another's page is the longer one, so
        # there is always a row that reads none.
        ready = [row for row in left if filled.isdisjoint(row.pages[: row.held // page_tokens])]
        parts.append(ready)
        left = [row for row in left if row not in ready] if len(ready) < len(left) else []
    return parts


class Window:
    """Exact copies of a sequence's last tokens in one layer; keys before `packed` have slots."""

    __slots__ = ("end", "first", "memories", "packed", "slot")

    def __init__(self, slot: int, held: int, memories: tuple[TokenMemory, TokenMemory]) -> None:
        self.slot, self.memories = slot, memories  # in the pool, or -1; of K and V
        self.first = self.end = self.packed = held


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; of a CPU's, memory that no sequence has used yet is the system's still."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Smaller pieces than its threshold malloc may have at hand, and writes zeros to them.
    return torch.frombuffer(mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class WindowPool:
    """Windows of one layer, `width` tokens each (0 for none): of `sequences`, those used last."""

    # Called with the page and the window that gives way to another: its page may still be read.
    lost: Callable[[int, Window], None] | None = None

    def __init__(
        self,
        width: int,
        sequences: int,
        page_tokens: int,
        shapes: tuple[tuple[int, int], tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        self.width, self.page_tokens = width, page_tokens
        count, room = (sequences, width + SLACK) if width else (1, 0)
        self._slots: dict[int, tuple[TokenMemory, TokenMemory]] = {}  # those that had a sequence
        self._pools = [_zeros((count, heads, room, dim), dtype, device) for heads, dim in shapes]
        self._none = self._memories(0, 0)
        self._free = list(range(sequences))
        # By the page of the last token; those used last stand last.
        self._at: dict[int, Window] = {}

    def claim(self, rows: Sequence[Row]) -> list[Window]:
        """Return the window of each row, reserved for it until `keep`."""
        if not self.width:
            return [Window(-1, row.held, self._none) for row in rows]
        known = self._at
        found: list[Window | None] = []
        for row in rows:
            page = row.pages[(row.held - 1) // self.page_tokens] if row.held else -1
            window = known.get(page)
            if window is not None and window.packed <= row.held <= window.end:
                window.end = row.held  # later ones are written again
                found.append(known.pop(page))
            else:
                found.append(None)
            if new := row.pages[-(-row.held // self.page_tokens) :]:
                self.forget(new)  # before any window gives way to another
        return [window or self._new(row.held) for row, window in zip(rows, found, strict=True)]

    def keep(self, rows: Sequence[Row], windows: Sequence[Window]) -> None:
        """Register windows under their rows' last pages."""
        if not self.width:
            return
        for row, window in zip(rows, windows, strict=True):
            pages = row.pages[row.held // self.page_tokens :]
            if len(pages) > 1 or pages[0] in self._at:
                self.forget(pages)
            self._at[row.pages[-1]] = window

    def forget(self, pages: Iterable[int]) -> None:
        """Drop the windows that are known by these pages, because others wrote to them."""
        gone = [self._at.pop(page) for page in pages if page in self._at]
        self._free += [window.slot for window in gone]

    def copied(self, source: int, target: int) -> None:
        """Let a sequence whose last page is a copy of another's have a copy of its window."""
        self.forget([target])
        if (window := self._at.get(source)) is None or len(self._at) == 1 > len(self._free):
            return
        self._at[source] = self._at.pop(source)  # it gives way to no other now
        made, first = self._new(window.end), window.first
        made.first, made.packed = first, window.packed
        made.memories = self._memories(made.slot, first)
        for memory, old in zip(made.memories, window.memories, strict=True):
            memory.tokens(first, window.end).copy_(old.tokens(first, window.end))
        self._at[target] = made

    def exact_from(self, windows: Sequence[Window]) -> list[int]:
        """Return the first token that the sequence of each window attends exactly."""
        return [advance(x.packed, x.first, x.end, 0, 0, 1, self.width).tail for x in windows]

    def make_room(self, windows: Sequence[Window]) -> None:
        """Make room for one more token after each window: all are moved when one has to be."""
        room = self.width + SLACK
        if self.width and room in [w.end - w.memories[0].start for w in windows]:
            for window, start in zip(windows, self.exact_from(windows), strict=True):
                self._move(window, start, window.end)

    def begin(self, window: Window, packed: int, end: int) -> None:
        """Let a new window be of a sequence's first tokens, which somebody else copies there."""
        window.packed, window.end = packed, end
        if self.width:
            (window.first,) = self.exact_from([window])
            window.memories = self._memories(window.slot, window.first)

    def append(self, window: Window, tokens: tuple[Tensor, Tensor]) -> None:
        """Copy new tokens, `[1, H, T, D]`, as far as they are in the window."""
        held = window.end
        window.end += tokens[0].shape[2]
        if self.width:
            (start,) = self.exact_from([window])
            self._move(window, start, held)
            for memory, x in zip(window.memories, tokens, strict=True):
                memory.tokens(max(start, held), window.end).copy_(x[:, :, max(start - held, 0) :])

    def _new(self, held: int) -> Window:
        if not self._free:
            page = next(iter(self._at))
            window = self._at.pop(page)
            if self.lost is not None:
                self.lost(page, window)
            self._free.append(window.slot)
        slot = self._free.pop()
        return Window(slot, held, self._memories(slot, held))

    def _memories(self, slot: int, start: int) -> tuple[TokenMemory, TokenMemory]:
        if (known := self._slots.get(slot)) is None:
            k, v = (TokenMemory(pool[slot : slot + 1], 0) for pool in self._pools)
            known = self._slots[slot] = k, v
        k, v = (x if x.start == start else TokenMemory(x.tensor, start) for x in known)
        return k, v

    def _move(self, window: Window, start: int, end: int) -> None:
        """Let the memory begin with the token `start`; those that it has until `end` move there."""
        for memory in window.memories if start < end else ():
            memory.tensor[:, :, : end - start] = memory.tokens(start, end).clone()
        window.first, window.memories = start, self._memories(window.slot, start)
