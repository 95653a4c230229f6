"""Where the tokens of a paged cache's sequences stand: pages, block tables, slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvpact.cache.sequence_pages import SequencePages
from kvpact.cache.sequences import Page
from kvpact.errors import GeometryError


class BlockTables(SequencePages):
    """What a `PagedKVCache` says about its pages."""

    def iter_pages(self, seq: int) -> Iterator[Page]:
        """Iterate over a sequence's pages and the tokens that stand on them."""
        sequence, size = self._sequence(seq), self.pool.page_size
        for index, page in enumerate(sequence.table):
            yield Page(page, index * size, min((index + 1) * size, sequence.length))

    def block_table(self, seqs: int | Sequence[int]) -> Tensor:
        """Return pages: int32 `[N, pages]`, -1 behind a row's end; `[pages]` for one sequence."""
        tables = [self._sequence(s).table for s in ([seqs] if isinstance(seqs, int) else seqs)]
        width = max((len(table) for table in tables), default=0)
        rows = [table + [-1] * (width - len(table)) for table in tables]
        result = torch.tensor(rows, dtype=torch.int32, device=self.device).view(len(rows), width)
        return result[0] if isinstance(seqs, int) else result

    def slot_mapping(self, seq: int, start: int = 0, end: int | None = None) -> Tensor:
        """Return where tokens stand: int64, `page * page_size + offset` for `start <= t < end`."""
        sequence, size = self._sequence(seq), self.pool.page_size
        limit = len(sequence.table) * size
        end = sequence.length if end is None else end
        if not 0 <= start <= end <= limit:
            raise GeometryError(f"tokens {start} to {end} are not within the {limit} reserved")
        tokens = torch.arange(start, end, dtype=torch.int64, device="cpu")
        pages = torch.tensor(sequence.table, dtype=torch.long, device="cpu")
        return (pages[tokens // size] * size + tokens % size).to(self.device)
