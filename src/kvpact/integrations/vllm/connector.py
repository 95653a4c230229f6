"""vLLM's side of the connector: prefixes in a store, shared by engines (``KVConnectorBase_V1``)."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvpact.integrations.pages.page import PageForm
from kvpact.integrations.vllm.connector_form import StepPlan
from kvpact.integrations.vllm.connector_pages import PackedPages, PlainPages
from kvpact.integrations.vllm.connector_scheduler import PrefixScheduler
from kvpact.integrations.vllm.connector_setup import (
    adapter_fingerprint,
    form_of,
    model_fingerprint,
)
from kvpact.integrations.vllm.connector_store import (
    COUNTED,
    NOTED,
    ConnectorCounts,
    ConnectorOptions,
    logger,
    options_of,
    release_store,
    share_store,
)
from kvpact.integrations.vllm.connector_worker import PrefixWorker
from kvpact.integrations.vllm.cpu_attention import orders_of
from kvpact.integrations.vllm.setting import native_plan


class ConnectorStats(KVConnectorStats):
    """Counts since the last report; parameters as of vLLM's class."""

    def reset(self) -> None:
        """Begin at zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank, or another step, counted."""
        for name, count in other.data.items():
            self.data[name] = self.data[name] + count if name in self.data else count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures that vLLM logs: counts, and means of samples."""
        return {k: sum(x) / len(x) if k in NOTED else x for k, x in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Prometheus counters and histograms named ``vllm:kvpact_…``; parameters as of vLLM's class."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        metrics: dict[str, tuple[Any, str, dict[str, Any]]] = {
            name: (self._counter_cls, what, {}) for name, what in COUNTED.items()
        }
        for name, (what, bounds) in NOTED.items():
            metrics[name] = self._histogram_cls, what, {"buckets": bounds}
        for name, (make, what, more) in metrics.items():
            metric = make(
                name=f"vllm:kvpact_{name}", documentation=what, labelnames=labelnames, **more
            )
            self._metrics[name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what vLLM collected."""
        for name, count in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in NOTED:
                for value in count:
                    metric.observe(value)
            else:
                metric.inc(count)


class KVPactConnector(KVConnectorBase_V1):
    """Parameters as of vLLM's `KVConnectorBase_V1`; see docs/vllm.md for how to start it."""

    _side: PrefixScheduler | PrefixWorker  # the one that is there, by the role, of the two below
    _scheduler: PrefixScheduler
    _worker: PrefixWorker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options: ConnectorOptions = options_of(transfer.kv_connector_extra_config)
        self._form = form_of(vllm_config, kv_cache_config, self._options.storage)
        self._counts = ConnectorCounts()
        store = share_store(self._options)
        self._open = True
        if role == KVConnectorRole.SCHEDULER:
            self._side = self._scheduler = PrefixScheduler(
                self._form,
                self._options,
                store,
                self._options.model or model_fingerprint(vllm_config),
                adapter_fingerprint,
                self._counts,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
            logger.info(
                "kvpact's connector shares prefixes in chunks of %d tokens as %s over %s; "
                "%d tensor-parallel ranks; a lookup or a load takes at most %g s",
                self._scheduler.chunk,
                ", ".join(dict.fromkeys(map(str, self._form.specs))),
                store,
                self._form.ranks,
                self._options.timeout,
            )
        else:
            self._worker = PrefixWorker(self._form, self._options, store, self._counts)
            self._side = self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: tokens that were not saved are computed again."""
        return False

    @property
    def counts(self) -> dict[str, int]:
        """Counts of this side of the connector since its start, see `COUNTED`."""
        return self._counts.total()

    @property
    def waiting(self) -> int:
        """Entries that wait to be saved: of the worker's side alone."""
        return self._side.waiting

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; None while the store has not answered."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a request's pages."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the worker's jobs of a step."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note loads that ended, and those that failed."""
        self._scheduler.came_back(
            connector_output.finished_recving or (), connector_output.invalid_block_ids or ()
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its pages were copied and may be used again."""
        self._scheduler.finished(request)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take vLLM's pages, whose layout is checked."""
        layers = self._vllm_config.compilation_config.static_forward_context
        pages: dict[str, PackedPages] = {}
        ours = self._options.storage is None
        for name, pair in zip(self._form.layers, self._form.codecs, strict=True):
            form, memory = PageForm(*pair, self._form.page), kv_caches[name]
            if ours:
                pages[name] = PackedPages(form, memory)
            else:
                plan = native_plan(*pair, memory.dtype)
                orders = orders_of(
                    layers[name], self._form.page, self._form.geometry.head_dim, memory.dtype
                )
                pages[name] = PlainPages(form, plan, memory, orders)

        def loaded(places: Sequence[int]) -> None:
            for name in pages if ours else ():
                layers[name].impl.loaded(places)

        def damaged(places: Sequence[int]) -> bool:
            # vLLM's own pages hold whatever was computed; encoding them tells.
            return ours and any(layers[name].impl.damaged(places) for name in pages)

        self._worker.register(pages, loaded, damaged)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the scheduler's jobs for a step."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the planned loads; vLLM goes on with other requests."""
        self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pass: a request is scheduled when all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy the pages of a layer that are to be saved."""
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Hand the copies to the thread that saves them."""
        self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended."""
        return None, self._worker.loaded(self._plan()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages whose load failed."""
        return self._worker.failed_pages()

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        new = self._counts.take()
        return ConnectorStats(data=new) if new else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counters that vLLM sent to its logger."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        """Return the Prometheus counters, ``vllm:kvpact_…``."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Refuse: chunks belong to all engines. After new weights, restart vLLM."""
        return False

    def shutdown(self) -> None:
        """Save what waits, within the timeout, and log the counters."""
        if not self._open:
            return
        self._open = False
        self._side.close()
        counts = ", ".join(f"{name}={count}" for name, count in self.counts.items())
        logger.info("kvpact's connector (%s): %s", self.role.name.lower(), counts)
        release_store(self._options)

    def _plan(self) -> StepPlan:
        return cast(StepPlan, self._get_connector_metadata())
