"""LMCache's server: its command line with the serde ``kvpact``, and a module of the server."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout, cpu_pages
from kvpact.integrations.lmcache.serde import KVPactSerde

SERDE = "kvpact"
"""The name by which LMCache's configuration asks for it."""
logger = logging.getLogger(__name__)


class Served:
    """The serdes of a process, and the server that they belong to, once it is there."""

    def __init__(self) -> None:
        self.serdes: list[KVPactSerde] = []
        self.server: Any = None

    def make(self, options: dict[str, Any]) -> KVPactSerde:
        """Return the serde of one adapter with options as of docs/serving.md."""
        given = {name: value for name, value in options.items() if name != "max_workers"}
        _check_names(given)
        width = given["head_dim"]
        layout = ChunkLayout(width, given.get("value_dim", width))
        if given.get("cpu_block_size", 0) != 0:
            layout = replace(layout, pages=cpu_pages(given["cpu_block_size"], width))
        calibration = given.get("calibration")
        if not isinstance(calibration, str | None):
            raise SpecError(f"calibration={calibration!r} should be the path of a file")
        chunks = ChunkFormat(given["spec"], layout, calibration)
        serde = KVPactSerde(chunks, lambda key: self._remove(key, options))
        self.serdes.append(serde)
        return serde

    def _remove(self, key: Any, options: dict[str, Any]) -> None:
        """Remove an entry from the adapter that was configured with these very options."""
        if self.server is None:
            return
        for about, adapter in self.server.storage_manager.l2_adapters():
            config = about.config.serde_config
            if config is not None and config.kwargs is options:
                adapter.delete([key])


class StatusModule:
    """A module of LMCache's server, which is its `context`."""

    def __init__(self, served: Served, context: Any) -> None:
        self._served, self.context = served, context

    def report_status(self) -> dict[str, Any]:
        """Return the counts of each serde, for ``GET /status``."""
        return {SERDE: [serde.stats() for serde in self._served.serdes]}

    def close(self) -> None:
        """Log the counts."""
        for serde in self._served.serdes:
            logger.info("kvpact: %s", serde.stats())


_SERVED = Served()  # LMCache calls both of the functions below without saying for whom


def create_serde(options: dict[str, Any]) -> Any:
    """Return what LMCache runs for an adapter with ``"serde": {"type": "kvpact", …}``."""
    from lmcache import torch_device_type
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor

    if torch_device_type == "cpu" and "cpu_block_size" not in options:
        raise SpecError(
            "LMCache's serde 'kvpact': on a machine without accelerator, say what lies in chunks: "
            "with vLLM's CPU worker \"cpu_block_size\" is vLLM's --block-size, with any other "
            "engine it is 0"
        )
    workers = options.get("max_workers", 1)
    if type(workers) is not int or workers < 1:
        raise SpecError(f"max_workers={workers!r} should be a number of threads, as 2")
    serde = _SERVED.make(options)
    logger.info("kvpact stores chunks as %s", serde.chunks)
    return AsyncSerdeProcessor(serde, serde, max_workers=workers)


def build_server_modules(build: Any) -> StatusModule:
    """Return the module of a server that starts (LMCache's ``--server-module``)."""
    _SERVED.server = build.server_context
    return StatusModule(_SERVED, build.server_context)


def _check_names(options: Mapping[str, Any]) -> None:
    wanted = {"spec", "head_dim"}
    unknown = options.keys() - wanted - {"value_dim", "cpu_block_size", "calibration"}
    missing = wanted - options.keys()
    if unknown or missing:
        what = f"{sorted(missing)} missing" if missing else f"{sorted(unknown)} unknown"
        raise SpecError(
            f"LMCache's serde 'kvpact': {what}; write "
            '{"type": "kvpact", "spec": "turboquant:bits=4", "head_dim": 128}'
        )


def register() -> None:
    """Make the serde ``kvpact`` known to LMCache in this process. Raises `BackendUnavailable`."""
    try:
        from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory
    except ImportError as error:
        raise BackendUnavailable(
            f"LMCache can't be imported ({error}): pip install 'kvpact[lmcache]'"
        ) from error
    if SERDE not in get_registered_serde_types():
        register_serde_factory(SERDE, create_serde)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``lmcache`` with these arguments, with the serde and, for ``server``, its module."""
    register()
    from lmcache.cli.main import main as lmcache
    from lmcache.logging import init_logger

    # LMCache makes a handler for each logger of its own, and none for others.
    for module in (KVPactSerde.__module__, __name__):
        init_logger(module)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["server"]:
        given += ["--server-module", json.dumps({"module_path": __name__})]
    lmcache(given)
