"""The serde ``kvpact``, and LMCache's server with it: a command line and a module of the server.

LMCache takes whatever a serde raises as a failure, and the engine computes.
"""

import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvpact.errors import (
    BackendUnavailable,
    GeometryError,
    IntegrityError,
    KVPactError,
    MismatchError,
    SpecError,
)
from kvpact.integrations.chunks import ChunkFormat, digest_of
from kvpact.integrations.lmcache.layout import ChunkLayout, cpu_pages


def key_hash(key: Any) -> str:
    """Return the BLAKE2b-256 of an LMCache `ObjectKey`: every field, its length in front."""
    parts = (
        key.chunk_hash,
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.cache_salt.encode(),
    )
    return digest_of(32, parts)


class KVPactSerde:
    """Serializer and deserializer of LMCache, for any threads; `remove` drops damaged chunks."""

    def __init__(self, chunks: ChunkFormat[ChunkLayout], remove: Callable[[Any], None]) -> None:
        self.chunks = chunks
        self._remove = remove
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._refused: set[str] = set()

    def stats(self) -> dict[str, Any]:
        """Return counts since the start: chunks, their bytes in the store, and before."""
        names = ("stored", "stored_bytes", "given_bytes", "not_stored")
        with self._lock:
            counts = {n: self._counts[n] for n in (*names, "loaded", "damaged", "mismatched")}
        return {"spec": str(self.chunks.spec), **counts}

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the bytes of a chunk; 1 if it can't be packed: LMCache holds locks here."""
        try:
            return self.chunks.nbytes(zip(layout_desc.shapes, layout_desc.dtypes, strict=True))
        except KVPactError as error:
            self._refuse(error)
            return 1

    def _refuse(self, error: KVPactError) -> None:
        with self._lock:
            known = str(error) in self._refused
            self._refused.add(str(error))
        if not known:
            logger.error("kvpact stores nothing of this engine: %s", error)

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Write a chunk's bytes into a buffer, and return how many. Raises `KVPactError`."""
        try:
            self.chunks.layout.check_model(key.model_name)
            data = self.chunks.pack(_tensors(src), key_hash(key))
        except KVPactError as error:
            self._count(not_stored=1)
            if isinstance(error, GeometryError):
                self._refuse(error)
            raise
        memoryview(dst.byte_array).cast("B")[: len(data)] = data
        self._count(stored=1, stored_bytes=len(data), given_bytes=src.get_size())
        return len(data)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Read a chunk, or raise; what can't be served is counted, logged and removed."""
        try:
            self.chunks.layout.check_model(key.model_name)
            self.chunks.unpack(bytes(src.byte_array), key_hash(key), _tensors(dst))
        except KVPactError as error:
            self._count(**{"damaged" if isinstance(error, IntegrityError) else "mismatched": 1})
            logger.warning(
                "kvpact: chunk %s of %s is computed again: %s",
                key.chunk_hash.hex(),
                key.model_name,
                error,
            )
            # What this process does not know, a later version or a method, may be good for others.
            if isinstance(error, IntegrityError | MismatchError):
                self._remove(key)
            raise
        self._count(loaded=1)


def _tensors(chunk: Any) -> list[Tensor]:
    return [chunk.get_tensor(index) for index in range(len(chunk.get_shapes()))]


SERDE = "kvpact"  # the name by which LMCache's configuration asks for it
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
    """Return the processor for an LMCache adapter with ``"serde": {"type": "kvpact", …}``."""
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
    init_logger(__name__)
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["server"]:
        given += ["--server-module", json.dumps({"module_path": __name__})]
    lmcache(given)
