"""Checks of the batch: reorder, select, repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError
from kvpact.testing.cache_base import CacheKit
from kvpact.testing.data import Shape, floats, integers
from kvpact.testing.depends import depends_on
from kvpact.testing.held import same_bytes

ROWS = Shape(3, 2, (66, 1, 64), 32, 48, torch.float32)


class RowChecks(CacheKit):
    """Rows of the batch rearranged."""

    def _check(self, operation: str, argument: Any, rows: list[int]) -> None:
        self.needs("fork", operation)
        config = AttendConfig(padding=integers(0, 3, 40))
        cache = self.filled(ROWS, config=config, layers=2)
        before = [self.read(cache, ROWS, layer) for layer in range(2)]
        getattr(cache, operation)(argument)
        for layer in range(2):
            for was, now in zip(before[layer], self.read(cache, ROWS, layer), strict=True):
                assert same_bytes(now, was[rows])
        self._continues(cache, config, rows)

    def _continues(self, cache: Any, config: AttendConfig, rows: list[int]) -> None:
        """Tokens that come later give what a cache gives that held these rows from the start."""
        given = _rows(self.tokens(ROWS, ROWS.tokens), rows)
        assert config.padding is not None
        fresh = self.make_cache(ROWS.geometry(2))
        for layer in range(2):
            self.append(fresh, given, AttendConfig(padding=config.padding[rows]), layer)
        more = _rows(self.tokens(ROWS, 70, seed=1), rows)
        for one in (cache, fresh):
            for layer in range(2):
                self.append(one, more, layer=layer)
        self.assert_same(fresh, cache)

    def test_reorder(self) -> None:
        """Beam search: rows change places and may repeat."""
        self._check("reorder", integers(2, 0, 0), [2, 0, 0])

    @depends_on("bytes")
    def test_select(self) -> None:
        """Some rows stay, in the order asked for."""
        self._check("select", integers(2, 1), [2, 1])

    def test_select_more(self) -> None:
        """Rows may be selected more than once."""
        self._check(
            "select",
            integers(1, 1, 0, 2, 1).int(),
            [1, 1, 0, 2, 1],
        )

    def test_repeat(self) -> None:
        """Every row, several times, next to each other."""
        self._check("repeat", 2, [0, 0, 1, 1, 2, 2])

    def test_wrong_rows_are_refused(self) -> None:
        """A named error, and nothing changes."""
        self.needs("select", "reorder", "repeat")
        cache = self.filled(ROWS, layers=2)
        before = self.state(cache)
        wrong: list[tuple[str, Any]] = [
            ("select", integers(3)),
            ("select", integers(-1)),
            ("select", integers()),
            ("select", floats(0.0)),
            ("select", integers(0)[None]),
            ("select", [0]),
            ("reorder", integers(0)),
            ("reorder", integers(0, 1, 3)),
            ("reorder", None),
            ("repeat", 0),
            ("repeat", 1.0),
        ]
        for operation, argument in wrong:
            with pytest.raises(KVPactError):
                getattr(cache, operation)(argument)
            self.assert_same(before, cache)

    def test_rows_of_an_empty_cache(self) -> None:
        """Nothing held, nothing to rearrange."""
        self.needs("select", "repeat")
        cache = self.make_cache(ROWS.geometry())
        cache.select(integers(0))
        cache.repeat(3)
        assert cache.seq_len(0) == 0


def _rows(tokens: tuple[Tensor, Tensor, Tensor], rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    k, v, q = tokens
    return k[rows], v[rows], q[rows]
