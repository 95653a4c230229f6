"""Runners over pages of one sequence after another: a table says where they lie."""

import numpy as np

from kvpact.cache.paged.pool import PageSource
from kvpact.kernels import Segment, StepRunner, Where

ROOM = 16  # pages in a table, at least


class NamedPages(PageSource):
    """The pages that `name` named last."""

    def __init__(self, fields: Segment, pages: tuple[int, ...], page_size: int) -> None:
        super().__init__(fields, (), page_size)
        tensors = list(fields.values())
        self._firsts = np.array([[x.data_ptr()] for x in tensors], dtype=np.int64)
        self._page = tensors[0].stride(0) * tensors[0].itemsize  # all are parts of the same pages
        self._table = np.zeros((len(fields), max(2 * len(pages), ROOM)), dtype=np.int64)
        for i, (name, x) in enumerate(fields.items()):
            self._where[name] = Where(self._table, i, 0, x.stride(1) * x.itemsize)
        self.name(pages)

    def name(self, pages: tuple[int, ...]) -> bool:
        """Let it be these pages; False where there is no room for so many."""
        if pages == self.pages:
            return True
        if len(pages) > self._table.shape[1]:
            return False
        self.pages = pages
        offsets = np.array(pages, dtype=np.int64) * self._page
        np.add(self._firsts, offsets, out=self._table[:, : len(pages)])
        return True


def renamed(runners: list[StepRunner], pages: tuple[int, ...]) -> StepRunner | None:
    """Take a runner that nobody needs for other pages; None where there is none for so many."""
    sources = runners[-1].sources if runners else (None,)
    fit = all(isinstance(x, NamedPages) and x.name(pages) for x in sources)
    return runners.pop() if fit else None
