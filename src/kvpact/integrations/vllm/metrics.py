"""What vLLM's page of metrics says of pages: set in its workers, so vLLM has to collect it there.

Prometheus' client does so where ``PROMETHEUS_MULTIPROC_DIR`` names a folder for all processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

PAGES = {
    "page_bytes": "Bytes of a page in one layer.",
    "page_tokens": "Tokens of a page.",
    "capacity_ratio": "How many times the tokens of pages in the dtype fit into the same memory.",
}
"""Names of the gauges, and what they show."""


def show_pages(labels: dict[str, str], **values: float) -> None:
    """Set the gauges of `PAGES`, ``vllm:kvpact_…``, for layers of one spec."""
    for name, value in values.items():
        _gauge(name, tuple(labels)).labels(**labels).set(value)


@cache
def _gauge(name: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Gauge

    return Gauge(f"vllm:kvpact_{name}", PAGES[name], labels, multiprocess_mode="mostrecent")
