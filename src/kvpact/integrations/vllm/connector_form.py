"""The form of an engine's pages, and the chunks that the scheduler's side gives the workers."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import lcm
from pathlib import Path
from typing import Any, NoReturn

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvpact.cache.layer.states import PAGE_TOKENS
from kvpact.errors import BackendUnavailable, GeometryError, MismatchError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import NOTHING, Learnt, learnt_of
from kvpact.integrations.fingerprint import files_fingerprint, model_folder
from kvpact.integrations.pages.page import check_serves, codecs
from kvpact.integrations.vllm.calibrated import known_of
from kvpact.integrations.vllm.dtype import TAKEN
from kvpact.integrations.vllm.setting import (
    SETTING,
    layer_number,
    served,
    served_specs,
    specs_of,
)
from kvpact.methods import Codec
from kvpact.prefixes.chunks import ChunkKind
from kvpact.snapshot import Identity
from kvpact.spec import Spec, parse_spec


@dataclass(frozen=True)
class StoredForm:
    """Layers of one rank in the order of the model, and how their tokens are stored."""

    layers: tuple[str, ...]
    specs: tuple[Spec, ...]
    geometry: CacheGeometry  # of the rank's heads
    page: int  # tokens of vLLM's
    rank: int
    ranks: int
    learnt: tuple[Learnt, ...] = field(compare=False, repr=False)  # all ranks' heads

    @cached_property
    def codecs(self) -> tuple[tuple[Codec, Codec], ...]:
        """The codecs of K and V of each layer."""
        geometry = self.geometry
        assert geometry.dtype is not None
        kind = geometry.head_dim, geometry.value_dim, geometry.dtype
        both = zip(self.specs, self.learnt, strict=True)
        return tuple(codecs(spec, *kind, learnt) for spec, learnt in both)

    def chunk(self, wanted: int | None) -> int:
        """Return the tokens of a chunk. Raises `GeometryError`."""
        size = lcm(PAGE_TOKENS, self.page) if wanted is None else wanted
        if size % self.page:
            raise GeometryError(
                f"chunk={wanted}: a chunk is whole pages; vLLM's have {self.page} tokens"
            )
        return size

    def kind(self, identity: Identity, chunk: int) -> ChunkKind:
        """Return the kind of chunks of one model, adapter and tenant."""
        return ChunkKind(self.specs, self.geometry, self.codecs, identity, chunk)


@dataclass(frozen=True)
class ChunkPiece:
    """A chunk of a request's tokens. `key`: in the store, without the rank."""

    key: str
    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Chunks that go into pages, one after the other, without the first `skip` pages."""

    request: str
    identity: Identity
    pieces: tuple[ChunkPiece, ...]
    pages: tuple[int, ...]
    skip: int


@dataclass(frozen=True)
class Save:
    """Chunks that this step completes, and their pages, in order."""

    identity: Identity
    pieces: tuple[ChunkPiece, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """The work of workers in one step; if `idle`, no token is computed: loads can be waited for."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False


def of_rank(identity: Identity, rank: int, ranks: int) -> Identity:
    """Return the identity in a rank's chunks, which keeps other ranks from taking them."""
    return replace(identity, tenant=f"{identity.tenant} {rank}of{ranks}")


def entry_name(key: str, rank: int, ranks: int) -> str:
    """Return the store's key of one rank's part of a chunk: the heads that it holds."""
    return f"{key}-{rank}of{ranks}"


def _refuse(what: str) -> NoReturn:
    raise BackendUnavailable(f"kvpact's connector does not cover {what}")


def form_of(config: Any, kv_cache_config: Any, storage: str | None) -> StoredForm:
    """Return the form of a rank's pages. Raises `BackendUnavailable`, `SpecError`."""
    parallel, groups = config.parallel_config, kv_cache_config.kv_cache_groups
    policy = config.kv_transfer_config.kv_load_failure_policy
    for there, what in (
        (len(groups) != 1, "models with several kinds of layers"),
        (config.speculative_config is not None, "speculative decoding"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (parallel.decode_context_parallel_size > 1, "context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism"),
        (policy != "recompute", 'kv_load_failure_policy "fail", since stores forget: "recompute"'),
        (config.cache_config.cache_dtype not in TAKEN, "--kv-cache-dtype"),
    ):
        if there:
            _refuse(what)
    pages, names = groups[0].kv_cache_spec, groups[0].layer_names
    layers = tuple(sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))
    if isinstance(pages, UniformTypeKVCacheSpecs):  # as many tokens, of unlike bytes
        if any(each.sliding_window is not None for each in pages.kv_cache_specs.values()):
            _refuse("models with several kinds of layers")
        pages = pages.kv_cache_specs[layers[0]]
    if type(pages) is not FullAttentionSpec:
        _refuse(f"layers of {type(pages).__name__}")
    geometry = CacheGeometry(
        len(layers),
        pages.num_kv_heads,
        pages.head_size,
        pages.head_size_v,
        config.model_config.dtype,
    )
    ranks = parallel.tensor_parallel_size
    total = config.model_config.get_total_num_hidden_layers()
    specs = _specs(storage, layers, total)
    learnt = (NOTHING,) * len(layers)
    known = None if storage is not None else known_of(config.model_config, served_specs(total))
    if known is not None:
        numbers = [layer_number(name, total) for name in layers]
        heads = config.model_config.get_total_num_kv_heads()
        whole = replace(geometry, num_kv_heads=heads)
        learnt = tuple(learnt_of(known, numbers, specs, whole, total))
    place = pages.block_size, parallel.rank % ranks, ranks
    return StoredForm(layers, specs, geometry, *place, learnt)


def _specs(storage: str | None, layers: Sequence[str], total: int) -> tuple[Spec, ...]:
    """Return the spec by which each layer's tokens are stored."""
    given = served() is not None
    if storage is None and given:
        return specs_of(layers, served_specs(total))
    if storage is None or given:
        raise SpecError(
            f"chunks have the slots of kvpact's pages ({SETTING}), or vLLM's own tokens as "
            "kv_connector_extra_config's storage says: set one of the two"
        )
    spec = parse_spec(storage)
    check_serves(spec, "storage")
    return (spec,) * len(layers)


def model_fingerprint(config: Any) -> str:
    """Return a fingerprint of a model's config, dtype and weights. Raises `MismatchError`."""
    model = config.model_config
    shown: dict[str, Any] = {
        "config": model.hf_config.to_dict(),
        "quantization": model.quantization,
        "dtype": str(model.dtype),
    }
    if any(kind in json.dumps(shown, default=str) for kind in ("longrope", "dynamic")):
        shown["longest"] = model.max_model_len  # such RoPE may depend on it
    return files_fingerprint(_folder(model.model, model.revision), shown)


def _folder(name: str, revision: str | None) -> Path:
    """Return where a model's files lie on this machine."""
    folder = model_folder(name, revision)
    if folder is None:
        raise MismatchError(
            f"the files of {name} are not on this machine, so they have no fingerprint; name the "
            "model: kv_connector_extra_config's model"
        )
    return folder


def adapter_fingerprint(request: Any) -> str | None:
    """Return the fingerprint of a request's adapter; None where it has none."""
    lora = request.lora_request
    return None if lora is None else _adapter(lora.lora_int_id, lora.lora_path)


@cache
def _adapter(number: int, path: str) -> str:
    folder = _folder(path, None)
    return files_fingerprint(folder, json.loads((folder / "adapter_config.json").read_text()))
