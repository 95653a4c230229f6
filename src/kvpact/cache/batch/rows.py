"""Operations of a `CompressedKVCache` on the rows of its batch, whatever holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import SupportsIndex

import torch
from torch import Tensor

from kvpact.cache.memory import room_for
from kvpact.cache.stats import Summarized
from kvpact.callable_package import tells_names
from kvpact.contract import AttendConfig, Fused
from kvpact.errors import GeometryError, SnapshotError
from kvpact.geometry import check_count

_MEANT = {
    **dict.fromkeys(("crop", "trim"), "cache.truncate(length)"),
    **dict.fromkeys(("append", "update"), "cache.attend(layer, q=q, k=k, v=v), or .store(...)"),
    **dict.fromkeys(("get_seq_length", "length", "num_tokens"), "cache.seq_len()"),
    "is_compileable": "CompressedCache(model, spec), for generate of transformers",
    "load": "cache.restore(kvpact.Snapshot.load(path))",
    "save": "cache.snapshot().save(path)",
}
"""Corrections of names that are guessed of a bare cache."""


def refuse_pickling(cache: object, protocol: SupportsIndex) -> str:
    """Raise `SnapshotError`: locks and addresses are part of a cache; for `__reduce_ex__`."""
    raise SnapshotError(
        f"copy.deepcopy makes a copy of a {type(cache).__name__} in memory, and its snapshot() can "
        "be saved and restored; the cache itself can't be pickled, nor copied by copy.copy"
    )


def check_rows(indices: Tensor, batch: int | None) -> None:
    """Raise `GeometryError` unless `indices` are rows of a batch; None: of any."""
    if (
        not isinstance(indices, Tensor)
        or indices.dim() != 1
        or indices.dtype not in (torch.int32, torch.int64)
    ):
        raise GeometryError("indices should be a 1-D tensor of integers")
    if batch is None:
        return
    if indices.numel() == 0 or indices.min() < 0 or indices.max() >= batch:
        raise GeometryError(f"indices should be one or more of 0 ... {batch - 1}")


@tells_names(_MEANT)
class BatchRows(Summarized, ABC):
    """`decode`, `select`, `reorder` and `repeat` for caches with rows."""

    __reduce_ex__ = refuse_pickling

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Rows; None while there are none."""

    @abstractmethod
    def attend(
        self, layer: int, *, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens and attend over all."""

    @abstractmethod
    def _keep_rows(self, indices: Tensor) -> None:
        """Carry out `select`; the indices were checked."""

    def decode(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Fused:
        """Store one token a row and attend over all; parameters and errors as in `attend`."""
        if isinstance(k, Tensor) and k.dim() == 4 and k.shape[2] != 1:
            raise GeometryError(f"decode takes one token, not {k.shape[2]}; use attend or prefill")
        return Fused(self.attend(layer, k=k, v=v, q=q, config=config))

    def select(self, indices: Tensor) -> None:
        """Keep the rows `indices` (`[N]` integers), in this order; rows may repeat."""
        batch = self.batch_size
        check_rows(indices, batch)
        if batch is not None:
            self._keep_rows(indices)

    def reorder(self, indices: Tensor) -> None:
        """Rearrange the rows (beam search): `select` with as many rows as there are."""
        batch = self.batch_size
        if isinstance(indices, Tensor) and batch not in (None, indices.numel()):
            raise GeometryError(f"reorder takes {batch} indices, not {indices.numel()}")
        self.select(indices)

    def repeat(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to each other; `CacheFull` without memory."""
        check_count("repeats", repeats, 1)
        if self.batch_size is not None:
            with room_for(f"every row {repeats:,} times"):
                rows = torch.arange(self.batch_size, dtype=torch.int64, device="cpu")
                self.select(rows.repeat_interleave(repeats))
