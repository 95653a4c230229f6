"""A contiguous cache with a budget of bytes, whose layers take fewer bits as they grow."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpact.cache.batch.contiguous import ContiguousCache
from kvpact.cache.budget.budget import Budget
from kvpact.cache.budget.ladder import Schedule
from kvpact.cache.budget.layer import BudgetLayer, put_on_rung
from kvpact.cache.modes import detached
from kvpact.contract import AttendConfig
from kvpact.errors import BudgetExceeded
from kvpact.geometry import check_count
from kvpact.snapshot.state import CacheState, LayerState
from kvpact.spec import Spec


class BudgetCache(ContiguousCache):
    """A contiguous cache with a budget; `kvpact.create_cache` makes it."""

    layer_type = BudgetLayer
    _layers: list[BudgetLayer]  # type: ignore[assignment]
    _schedule: Schedule | None = None

    def __init__(self, budget: Budget, *given: Any) -> None:
        self.budget = budget
        super().__init__(*given)

    @property
    def specs(self) -> list[Spec]:
        """The spec by which each layer stores tokens now."""
        return [layer.spec for layer in self._layers]

    def _check(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig
    ) -> list[float] | None:
        """Check a call, and raise `BudgetExceeded` unless the budget has room for its tokens."""
        sizes, entry = super()._check(layer, k, v, q, config), self._layers[layer]
        schedule, held, new = self._schedule, entry.length, k.shape[2]
        if schedule is None or (schedule.batch != k.shape[0] and self.batch_size is None):
            schedule = self.budget.schedule(self.geometry, k.shape[0], k.dtype)
            self._schedule = schedule
        schedule.check_length(held + new)
        if entry.k is None:
            entry.planned = schedule.ladder(layer, held, new)
        return sizes

    def _make_room(self, layer: int, k: Tensor, *others: Any) -> None:
        """Let all layers go down to a call's end where its tokens would not fit on the way."""
        if self._schedule is None or not isinstance(k, Tensor) or k.dim() != 4:
            return
        entry, new = self._layers[layer], k.shape[2]
        late = [x for x in self._layers if x.length and x.next_rung < entry.length + new]
        if late and self._schedule.crowded(entry.length, new):
            total = entry.length + new
            with self.compute.checking(), entry.lock:
                self._check(layer, k, *others)
            for one in late:  # no other lock is held
                one.go_down(total)

    def reserve(self, tokens: int) -> None:
        """Raise `SpecError`: room that is not used is not in the budget."""
        check_count("tokens", tokens)
        self.budget.refuse(reserve=tokens)

    @detached
    def restore_state(self, held: CacheState, device: Any = None) -> None:
        """Restore a state; every layer is checked and built before any of them changes."""
        super().restore_state(held, device)
        for x in [layer.k.tail for layer in self._layers if layer.k is not None][:1]:
            self._schedule = self.budget.schedule(self.geometry, held.batch, x.dtype)

    def _place(self, index: int, held: CacheState, state: LayerState) -> BudgetLayer:
        """Return an empty layer on the rung of a layer's state."""
        place = self._layers[index].empty()
        if state.streams is not None:
            dtype = state.streams[0].tail.dtype
            schedule = self.budget.schedule(self.geometry, held.batch, dtype)
            schedule.check_length(held.tokens)
            put_on_rung(index, place, self.budget.rungs, schedule.layers[index], state)
        return place

    @detached
    def _keep_rows(self, indices: Tensor) -> None:
        if (schedule := self._schedule) is not None and len(indices) > schedule.batch:
            raise BudgetExceeded(
                f"the budget was planned for {schedule.batch} rows, not {len(indices)}: give the "
                "first call as many rows as there are going to be"
            )
        super()._keep_rows(indices)

    def stats(self) -> dict[str, Any]:
        """Return what any cache tells, and what became of the budget."""
        stats, schedule = super().stats(), self._schedule
        more = schedule.stats(stats["tokens"], self.specs) if schedule else {}
        return stats | {"budget": {"bytes": self.budget.bytes, **more}}
