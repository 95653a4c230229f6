"""A HiCache storage backend of SGLang's, of type ``dynamic``: pages in a kvpact store.

SGLang takes a page that is not there, and whatever could not be read, as one to be computed. Its
threads for storage end at an exception, so none leaves `get`, `set` and `exists`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from kvpact.errors import GeometryError, IntegrityError, KVPactError, MismatchError, SpecError
from kvpact.integrations.calibrations import learning
from kvpact.integrations.chunks import ChunkFormat, digest_of
from kvpact.integrations.sglang.pages import PageLayout
from kvpact.spec import parse_spec
from kvpact.stores import Store, open_store

logger = logging.getLogger(__name__)

_SIDES = ("model_name", "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
"""The owner of a page; its tokens are in SGLang's key."""
EXAMPLE = '"kvpact": {"spec": "turboquant:bits=4", "store": "redis://localhost:6379"}'


class KVPactStorage(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """Pages of HiCache in a store, packed by a spec.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        SGLang's; its `extra_config` has ``kvpact``: ``spec``, ``store`` (a URL of `open_store`),
        ``calibration`` (a file or a model, for specs that learn; SGLang's model if omitted) and
        options of the store.
    options : mapping, optional
        What SGLang gives backends besides it; not used.

    Raises
    ------
    SpecError, StoreError
        What the configuration asks for can't be had.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        given = extra.get("kvpact")
        if not isinstance(given, dict) or not {"spec", "store"} <= given.keys():
            raise SpecError(f"the storage backend's extra config lacks spec or store: {EXAMPLE}")
        if extra.get("interface_v1"):
            raise SpecError("interface_v1 hands addresses on, and pages are packed: leave it out")
        if storage_config.is_mla_model:
            raise GeometryError("latents (MLA) are not covered: leave the storage backend out")
        if not storage_config.model_name:
            raise SpecError("SGLang gave no name of the model, by which pages are distinguished")
        self._owner = [str(getattr(storage_config, name)) for name in _SIDES]
        self._spec, self._calibration = given["spec"], given.get("calibration")
        if not isinstance(self._calibration, str | None):
            raise SpecError(f"calibration={self._calibration!r} should be the path of a file")
        if self._calibration is None and learning([parse_spec(self._spec)]):
            self._calibration = storage_config.model_name
        self._chunks: ChunkFormat[PageLayout] | None = None
        self._place = ""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        ours = ("spec", "store", "calibration")
        rest = {name: value for name, value in given.items() if name not in ours}
        self.store: Store = open_store(given["store"], **rest)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages these are. Raises a `KVPactError` that says what to do."""
        layout = PageLayout.of(mem_pool_host)
        chunks = ChunkFormat(self._spec, layout, self._calibration)
        packed = chunks.nbytes([((layout.numbers,), mem_pool_host.dtype)])
        exact = layout.numbers * mem_pool_host.dtype.itemsize
        if packed >= exact:
            raise GeometryError(
                f"{chunks} take {packed:,} bytes and {exact:,} as they are: start SGLang with a "
                "larger --page-size, as 64"
            )
        sizes = (layout.layers, layout.heads, layout.tokens, layout.head_dim)
        about = [*self._owner, str(chunks.spec), str(mem_pool_host.dtype), str(sizes)]
        if learnt := chunks.learnt_digest():
            about.append(learnt)
        self._chunks, self._place = chunks, digest_of(8, map(str.encode, about))
        super().register_mem_pool_host(mem_pool_host)
        logger.info("kvpact stores %s: %s bytes of %s", chunks, packed, exact)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools other than K and V's."""
        raise GeometryError(
            f"SGLang's pool {host_pool_name} is not covered: states of hybrid models are "
            "neither K nor V; leave the storage backend out"
        )

    def _format(self) -> ChunkFormat[PageLayout]:
        if self._chunks is None:
            raise SpecError("no pool yet: register_mem_pool_host comes first")
        return self._chunks

    def _name(self, key: str) -> str:
        """Return the name of a page in the store: whose it is, then SGLang's hash."""
        return self._place + digest_of(24, [key.encode()])

    def _count(self, what: str, error: KVPactError | None = None, key: str = "") -> None:
        with self._lock:
            self._counts[what] += 1
        if error is not None:
            logger.warning("kvpact: page %s is %s: %s", key, what.replace("_", " "), error)

    def stats(self) -> dict[str, Any]:
        """Return counts since the start."""
        names = ("stored", "not_stored", "loaded", "missed", "damaged", "unreadable")
        with self._lock:
            return {name: self._counts[name] for name in names}

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> Tensor | None:
        """Read a page into `target_location`, a flat tensor, and return it; None for none."""
        chunks, name = self._format(), self._name(key)
        if target_location is None:
            raise SpecError("a page is read into a tensor: give target_location")
        data = None
        try:
            data = self.store.fetch(name)
            if data is not None:
                chunks.unpack(data, name, [target_location])
        except KVPactError as error:
            damaged = data is not None or isinstance(error, IntegrityError)
            self._count("damaged" if damaged else "unreadable", error, key)
            # What failed the store's own checksum was removed by it.
            if data is not None and isinstance(error, IntegrityError | MismatchError):
                self._remove(name)
            return None
        found: Tensor | None = None if data is None else target_location
        self._count("missed" if found is None else "loaded")
        return found

    def _remove(self, name: str) -> None:
        try:
            self.store.delete(name)
        except KVPactError as error:
            logger.warning("kvpact: what is damaged stays: %s", error)

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store a page, a flat tensor, unless it is there; return whether it is now."""
        chunks, name = self._format(), self._name(key)
        if value is None:
            raise SpecError("a page is stored from a tensor: give value")
        try:
            if not self.store.contains(name):
                self.store.put(name, chunks.pack([value], name))
        except KVPactError as error:
            self._count("not_stored", error, key)
            return False
        self._count("stored")
        return True

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[Tensor | None]:
        """Read pages into tensors until one is missing: those after it are of no use."""
        found: list[Tensor | None] = []
        for key, target in zip(keys, target_locations or (), strict=True):
            useless = bool(found) and found[-1] is None
            found.append(None if useless else self.get(key, target))
        return found

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store pages until one can't be."""
        return all(self.set(key, value) for key, value in zip(keys, values or (), strict=True))

    def exists(self, key: str) -> bool:
        """Return whether a page is there; its bytes are checked when it is read."""
        self._format()
        try:
            return self.store.contains(self._name(key))
        except KVPactError as error:
            self._count("unreadable", error, key)
            return False

    def clear(self) -> None:
        """Remove the pages of this model, spec and worker."""
        self._format()
        for name in [name for name in self.store if name.startswith(self._place)]:
            self.store.delete(name)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
