"""The connector's counters as vLLM logs and exports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpact.integrations.vllm.connector_counts import COUNTED


class ConnectorStats(KVConnectorStats):
    """What was counted since it was asked for last; parameters as of vLLM's class."""

    def reset(self) -> None:
        """Begin at zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or another step, counted."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Prometheus counters named ``vllm:kvpact_…``; parameters as of vLLM's class."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, what in COUNTED.items():
            counter = self._counter_cls(
                name=f"vllm:kvpact_{name}", documentation=what, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what vLLM collected."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
