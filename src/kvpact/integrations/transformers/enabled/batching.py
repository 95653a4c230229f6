"""Continuous batching: packed pages in transformers' own `PagedAttentionCache`.

The pool stays transformers': it hands out blocks of bytes, shares, forks, evicts and offloads them.
What the bytes of full attention mean is known to `PackedAllocator` alone. Where the model's
attention is lent (`kvpact`), one native call attends for all requests of a batch, and no mask over
the pool is made; any other attention reads what the pages hold, decompressed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvpact.calibration import Calibration
from kvpact.errors import EnableError, KVPactError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import NOTHING, Known, learnt_of
from kvpact.integrations.calibrations import learning
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.page import PageForm, check_serves, codecs
from kvpact.integrations.pages.window import SLACK, Row, WindowPool
from kvpact.integrations.transformers.attention.forward import Loan, choose_attention, given_back
from kvpact.integrations.transformers.attention.learnt import calibration_of
from kvpact.integrations.transformers.enabled.served import ServedCalls
from kvpact.integrations.transformers.held.handles import new_pair
from kvpact.integrations.transformers.held.paged_tokens import PagedTokens
from kvpact.integrations.transformers.versions import rebound
from kvpact.kernels import Plan, choose
from kvpact.spec import DEFAULT_SPEC, Spec, parse_spec
from kvpact.units import TILE

_PAGES = "the pages of continuous batching"
_WINDOWS = 128  # requests at most that have windows; of more at a time, those that came last

_SECTOR = 32 << 20
"""Bytes of a sector, of which a pool has two in vain, where blocks fit better in larger ones."""


class ServedLayers(NamedTuple):
    """Specs and plans of the layers of a model, by their numbers."""

    specs: list[Spec]
    plans: list[Plan]
    windows: int  # requests that have some
    shape: tuple[int, int]  # KV heads and width
    calls: ServedCalls  # where requests are counted

    def forms(self, layers: Sequence[int], tokens: int) -> list[PageForm]:
        """Return the forms of some layers' pages. Raises `GeometryError`."""
        plans = [self.plans[i] for i in layers]
        return [PageForm(plan.k.codec, plan.v.codec, tokens) for plan in plans]

    def window_bytes(self) -> int:
        """Return the bytes of all windows, once they are in use."""
        widths = [width + SLACK for spec in self.specs if (width := spec.key.window)]
        token = 2 * self.shape[0] * self.shape[1] * self.plans[0].k.dtype.itemsize
        return int(self.windows * token * sum(widths))


def _block_bytes(packed: int, others: int) -> int:
    """Return the bytes of a block, of which few are a sector together with the `others`' blocks."""
    packed += -packed % TILE
    if not others:
        return packed
    most, sizes = max(1, _SECTOR // others), []
    for parts in range(1, packed // others + 1 + most):
        sector = parts * others
        counts = range(sector // packed, 0, -1)
        sizes += [sector // n for n in counts if sector % (n * TILE) == 0][:1]
    return next((size for size in sizes if size <= 1.05 * packed), min(sizes))


class PackedAllocator(FullAttentionCacheAllocator):
    """Blocks of packed pages, of a layer each; `served`: what each layer of the model holds."""

    supports_block_table = False

    def __init__(
        self,
        served: ServedLayers,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        self.num_key_value_heads, self.cache_dtype = num_key_value_heads, cache_dtype
        self.head_dim = find_head_dim(config)
        self._served, self._forms = served, served.forms(layer_indices, page_size)
        sizes = [num_key_value_heads * page_size * form.content for form in self._forms]
        self._places = [sum(sizes[:i]) for i in range(len(sizes))]
        page = self.get_bytes_per_page(num_key_value_heads, self.head_dim, cache_dtype, page_size)
        self._exact = page * len(layer_indices)
        # To transformers a block is one page; those of the layers lie in it one after another.
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices[:1],
            tokens_per_page=page_size,
            bytes_per_page=_block_bytes(sum(sizes), page * config.num_hidden_layers - self._exact),
            allow_block_sharing=allow_block_sharing,
        )
        self.layer_indices = layer_indices
        self._batch: tuple[Tensor | None, list[Row]] = (None, [])
        self._lengths: dict[str, int] = {}

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Take the pool's bytes, as transformers' own allocator does."""
        self.bytes_per_sector = bytes_per_sector
        blocks = self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, blocks, pool)
        heads, tokens, dim = self.num_key_value_heads, self.tokens_per_page, self.head_dim
        shapes, count = ((heads, dim), (heads, dim)), self._served.windows
        self.layers: dict[int, PagedLayer] = {}
        for i, form, place in zip(self.layer_indices, self._forms, self._places, strict=True):
            spec, plan = self._served.specs[i], self._served.plans[i]
            windows = WindowPool(spec.key.window, count, tokens, shapes, self.cache_dtype)
            pages = blocks[:, place : place + heads * tokens * form.content]
            pages = torch.unflatten(pages, 1, (heads, tokens, form.content))
            self.layers[i] = PagedLayer(form, plan, pages, windows)

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """Give a request the blocks that it needs."""
        had = len(self.block_table.get(request_id, ()))
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id not in self._lengths:
            self._served.calls.begin()
        self._lengths[request_id] = past_length + query_length
        if new := self.block_table[request_id][had:]:
            self._forget(new)
            self._count()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Take a request's blocks back; its window is free for another."""
        last = self.block_table.get(request_id, [])[-1:]
        super().free_blocks(request_id, no_cache)
        self._forget(last)
        compute = self._served.plans[0].compute
        self._served.calls.add(self._lengths.pop(request_id, 0), 0, 0, compute)

    def _count(self) -> None:
        """Report the bytes that requests hold now; shared blocks count once."""
        served, held = self._served, len(set().union(*self.block_table.values()))
        windows = served.window_bytes() * min(len(self.block_table), served.windows)
        nbytes = held * self.bytes_per_block + windows // served.windows
        served.calls.add(0, nbytes, held * self._exact, None)

    def _forget(self, blocks: list[int]) -> None:
        for layer in self.layers.values():
            layer.taken(blocks)

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copy whole blocks."""
        super().copy_blocks(source_block_ids, dest_block_ids)
        for layer in self.layers.values():
            layer.copied(source_block_ids, dest_block_ids)

    def rows(self, kwargs: dict[str, Any]) -> list[Row]:
        """Return the requests of a batch, found once for all layers."""
        write, read = (kwargs[name][self.index] for name in ("write_index", "read_index"))
        if self._batch[0] is not write:
            new, whole = (kwargs[f"cu_seq_lens_{x}"].tolist() for x in "qk")
            index, ends = (read, whole) if read.numel() else (write, new)
            blocks = (index // self.block_physical_stride).tolist()
            known, rows = {row.pages: row.pages for row in self._batch[1]}, []
            for i in range(len(new) - 1):
                if new[i] < new[i + 1]:
                    pages = tuple(blocks[ends[i] : ends[i + 1] : self.tokens_per_page])
                    held = whole[i + 1] - whole[i] - (new[i + 1] - new[i])
                    rows.append(Row(new[i], new[i + 1], held, known.get(pages, pages)))
            self._batch = write, rows
        return self._batch[1]


class PackedCache(PagedAttentionCache):
    """transformers' pool with packed pages for full attention; `loan`: of its attention."""

    def __init__(
        self, served: ServedLayers, loan: Loan | None, masks: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.loan = loan
        allocators = {**ATTN_TYPE_TO_ALLOCATOR, FULL_ATTENTION: partial(PackedAllocator, served)}
        memory = partial(_Memory, served, loan is not None, masks)
        names = {"ATTN_TYPE_TO_ALLOCATOR": allocators, "PagedAttentionMemoryHandler": memory}
        rebound(PagedAttentionCache.__init__, **names)(self, *args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return handles of a layer's tokens, or, to an attention that is not lent, the tokens."""
        allocator = self.layer_to_allocator[layer_idx]
        if not isinstance(allocator, PackedAllocator):
            return super().update(key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
        for name in ("cu_seq_lens_k", "max_length_k"):
            kwargs[name] = kwargs[name][allocator.layer_type]
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"].to(torch.int32)
        k, v = (x[0].transpose(0, 1) for x in (key_states, value_states))
        count = kwargs["read_index"][allocator.index].numel() or len(k)
        tokens = PagedTokens(allocator.layers[layer_idx], allocator.rows(kwargs), k, v, count)
        if self.loan is None:
            return tokens.part("k"), tokens.part("v")
        return new_pair(tokens, key_states, value_states, count, ())[1:]


class _Memory(PagedAttentionMemoryHandler):
    """Counts windows; where attention is `lent`, reads of exact pages alone; masks if there are."""

    def __init__(
        self, served: ServedLayers, lent: bool, masks: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.available_memory -= served.window_bytes()
        if lent and not masks:
            self.num_attention_masks = self.kv_heads_at_peak = 0
        elif lent:
            types, page = group_layers_by_attn_type(self.config), self.cb_config.page_size
            layers = len(served.specs)
            exact = self.bytes_per_block * (layers - len(types[FULL_ATTENTION])) // layers
            read = self.bytes_per_sector // exact * page
            self.kv_heads_at_peak = -(-self.kv_heads_at_peak * read // self.tokens_per_sector)


def _paged(spec: Spec) -> Spec:
    """Return a spec without what pages have no place for: sinks and means of groups."""
    spec = spec.with_options(sinks=0)
    key, value = (
        Spec(x, x).with_options(center=0).key if getattr(x, "center", 0) else x
        for x in (spec.key, spec.value)
    )
    return Spec(key, value, spec.slashed)


def served_specs(specs: Sequence[Spec]) -> list[Spec]:
    """Return specs as pages hold them, the default one without sinks and means; or `SpecError`."""
    default = parse_spec(DEFAULT_SPEC)
    for spec in dict.fromkeys(specs):
        wanted = _paged(spec)
        check_serves(wanted, "spec", calibrated=True, pages=_PAGES)
        if spec not in (default, wanted):
            raise SpecError(
                f"spec={str(spec)!r}: {_PAGES} have no place for sinks and means of groups; "
                f"write {str(wanted)!r}"
            )
    return [_paged(spec) for spec in specs]


def make_manager(
    model: Any,
    method: Callable[..., Any],
    specs: Sequence[Spec],
    calibration: Calibration | None,
    backend: str,
    calls: ServedCalls,
) -> Any:
    """Return the manager that `method` makes, with packed pages; or `EnableError`, `SpecError`."""
    config = model.config.get_text_config(decoder=True)
    if model.device.type != "cpu":
        raise EnableError(
            "continuous batching over compressed pages has run on CPUs alone: disable(model) first"
        )
    types = group_layers_by_attn_type(config)
    layers = types.get(FULL_ATTENTION, [])
    if not layers or layers[-1] >= len(specs):
        raise EnableError(
            f"{type(model).__name__} has no layers with full attention, or some that share K and "
            "V: disable(model) before it batches"
        )
    specs = served_specs(specs)
    heads, dim = find_num_key_value_heads(config), find_head_dim(config)
    held = learning(specs) and (calibration or calibration_of(model, learning(specs)))
    known = Known(held, "calibration") if isinstance(held, Calibration) else None
    geometry, compute, plans = CacheGeometry(1, heads, dim, dtype=model.dtype), choose(backend), []
    found = learnt_of(known, layers, [specs[i] for i in layers], geometry, len(specs))
    states = dict(zip(layers, found, strict=True))
    for i, spec in enumerate(specs):
        pair = codecs(spec, dim, dim, model.dtype, states.get(i, NOTHING))
        k, v = (compute.stream(x, model.device, model.dtype) for x in pair)
        plans.append(compute.plan(k, v))
    before = model.config._attn_implementation
    with given_back(config):
        manager = method()
    if hasattr(manager, "packed"):
        return manager  # which was kept
    given = manager.continuous_batching_config
    windows = min(given.max_requests_per_batch, _WINDOWS)
    served = ServedLayers(specs, plans, windows, (heads, dim), calls)
    try:
        served.forms(layers, given.page_size)
        if manager.batch_processor is not None or manager.distributed_helper.tp_size > 1:
            raise EnableError(
                "a manager from before `enable`, or tensor parallelism, has exact pages: call "
                "model.destroy_cached_continuous_batching_manager(), or disable(model), first"
            )
    except KVPactError:
        if manager._original_attn_impl is not None:
            model.set_attn_implementation(before)
        raise
    manager.packed = tuple(specs)
    make, manages = type(manager)._create_batch_processor, ref(manager)

    def create() -> Any:
        loan, masks = choose_attention(config, "auto"), len(types) > 1
        made = rebound(make, PagedAttentionCache=partial(PackedCache, served, loan, masks))
        with given_back(config) if masks else nullcontext():  # which are made for sdpa by name
            return made(manages())

    manager._create_batch_processor = create
    return manager
