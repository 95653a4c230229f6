"""State shared by the layers of one transformers cache: held tokens, and tokens that wait."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kvpact.cache import ContiguousCache, cache_specs
from kvpact.cache.budget.budget import Budget
from kvpact.cache.budget.cache import BudgetCache
from kvpact.cache.layer.wait import Wait
from kvpact.cache.paged.view import PagedView
from kvpact.calibration import Calibration
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers.held.calls import CallLog
from kvpact.integrations.transformers.held.gaps import Gaps
from kvpact.integrations.transformers.model.facts import INDEXED, SLIDING, layer_facts
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.kernels import Compute, Hold
from kvpact.key_offset import KeyOffset
from kvpact.spec import Spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.held.handles import HandlePair

BatchCache = ContiguousCache | PagedView  # the cache that holds the tokens of one batch


class Asked(NamedTuple):
    """The arguments of a layer's attention, and the `AttendConfig` made of them."""

    plain: tuple[object, ...]
    mask: Tensor | None
    sink_logits: Tensor | None
    bias: Tensor | None
    config: AttendConfig


class SharedState:
    """State shared by the layers of one transformers cache, without a reference to it or to them.

    `specs`: one per compressed layer, empty over a paged cache; `window`: of attention that slides.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        exact_new: bool,
        specs: list[Spec],
        compute: Compute | None = None,
        key_offsets: dict[int, KeyOffset] | None = None,
        calibration: Calibration | None = None,
        window: int = 0,
        budget: Budget | None = None,
    ) -> None:
        self.budget = budget
        self.window = window
        self.recording = False  # layers with a window keep all tokens until a rollback
        self.key_offsets, self.calibration = key_offsets, calibration
        self.config, self.exact_new, self.specs, self.compute = config, exact_new, specs, compute
        facts = layer_facts(config)
        self.latent_widths = facts.latent_widths
        self.indexed = not INDEXED.isdisjoint(facts.types)  # layers choose what they attend to
        self.held: list[BatchCache | None] = [None] * len(specs)  # nearly always one cache
        self.waiting: list[Any] = [None] * len(specs)  # the layers' `NewTokens` that nothing used
        self.asked: Asked | None = None  # of the last layer; most others are called the same way
        self.latest: tuple[Any, BatchCache] | None = None
        self.may_wait = not window  # the model's attention takes exact K and V, without softcap
        self.wait: tuple[Spec, Any, Wait] | None = None
        self.attention: str | None = None  # the config's, which it is slow to read
        self.handles: HandlePair | None = None  # the last layer's, of its `update`
        kinds = zip(facts.types, facts.options, strict=True)
        windows = [x.get("sliding_window", 0) for kind, x in kinds if kind == SLIDING]
        self.heap = Hold(max(windows, default=0))
        self.call_log = CallLog()
        self.open(Gaps())

    def hold(self, cache: BatchCache | None, layers: int) -> None:
        """Let one cache hold the tokens of all layers; those that wait are dropped."""
        self.held, self.waiting = [cache] * layers, [None] * layers
        self.asked = self.handles = self.wait = self.latest = None
        self.call_log = CallLog()
        self.open(Gaps())

    def open(self, gaps: Gaps) -> None:
        """Count the tokens in gaps from now on."""
        self.gaps, self.gone = gaps, gaps.gone

    def opening(self, gaps: Gaps) -> tuple[tuple[Any, str, Any], ...]:
        """Return the attributes that `open` would set: owners, names and values."""
        return (self, "gaps", gaps), (self, "gone", gaps.gone)

    def caches(self) -> list[BatchCache]:
        """Return every cache once."""
        return list({id(cache): cache for cache in self.held if cache is not None}.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedState:
        given = self.config, self.exact_new, self.specs, self.compute, self.key_offsets
        other = SharedState(*given, self.calibration, self.window, self.budget)
        forks = {id(cache): cache.fork() for cache in self.stored()}
        other.hold(None, len(self.held))
        other.recording = self.recording
        other.open(self.gaps)
        other.call_log = deepcopy(self.call_log, memo)
        other.held = [None if cache is None else forks[id(cache)] for cache in self.held]
        memo[id(self)] = other
        return other

    def wait_of(self, cache: ContiguousCache, layer: int, k: Tensor, v: Tensor) -> Wait:
        """Return how long a layer's first tokens wait; most layers have the same answer."""
        entry = cache.entry(layer)
        shape = cache, k.shape[:2], k.dtype, k.device
        if entry.codecs is not None or self.wait is None or self.wait[:2] != (entry.spec, shape):
            self.wait = entry.spec, shape, Wait.of(entry, k, v)
        return self.wait[2]

    def end_call(self) -> None:
        """Drop a call's mask and tokens, which are kept no longer than the call."""
        asked, self.handles = self.asked, None
        if asked is not None and not (
            asked.mask is asked.sink_logits is asked.bias is asked.config.origin is None
        ):
            self.asked = None

    def stored(self) -> list[BatchCache]:
        """Store the tokens that nothing has used; return every cache once."""
        for tokens in self.waiting:
            if tokens is not None:
                tokens.store()
        return self.caches()

    def look(self, held: int) -> None:
        """Store a call's tokens that may not be storable later; if that raises, none waits."""
        waiting = [tokens for tokens in self.waiting if tokens is not None]
        doubtful = [tokens for tokens in waiting if not tokens.fits(held)]
        try:
            for tokens in doubtful:
                tokens.store()
        except BaseException:
            for tokens in waiting:
                if tokens in doubtful:
                    tokens.wait_again()
                tokens.cut(held)
            raise

    def remove(self, count: int, length: int) -> None:
        """Forget the last `count` tokens of every row; `length` are left, those in gaps counted."""
        length, gaps = self.gaps.held(length), self.gaps.cut(length)
        for tokens in self.waiting:
            if tokens is not None and not tokens.whole:
                tokens.store()
        for cache in self.caches():
            if isinstance(cache, PagedView):
                remove_last(cache, count)
                continue
            for tokens, held in zip(self.waiting, self.held, strict=True):
                if tokens is not None and held is cache:
                    tokens.cut(length)
            cache.truncate(length)
        self.open(gaps)

    def cache_for(self, layer: int, k: Tensor, v: Tensor) -> BatchCache:
        """Return the cache for a layer's first tokens; one is made for all layers of one shape."""
        shape = k.shape[1], k.shape[3], v.shape[3], k.dtype
        if self.latest is None or self.latest[0] != shape:
            latent = k.shape[1] == 1 and k.shape[3] in self.latent_widths
            geometry = CacheGeometry(len(self.specs), *shape, latent)
            known = self.caches()
            same = next((x for x in known if x.geometry == geometry), None)
            if self.budget is not None and known and same is None:
                raise GeometryError(
                    "layers have K and V of different shapes: a budget needs layers of one shape"
                )
            self.latest = shape, same or self.new_cache(geometry)
        cache = self.held[layer] = self.latest[1]
        return cache

    def new_cache(self, geometry: CacheGeometry) -> ContiguousCache:
        """Return an empty cache of all layers."""
        one = replace(geometry, num_layers=1)
        specs = [cache_specs(spec, one)[0] for spec in self.specs]
        offsets = None if geometry.latent else self.key_offsets
        given = specs, geometry, None, self.calibration, self.compute, offsets
        if self.budget is None:
            cache = ContiguousCache(*given)
        else:
            cache = BudgetCache(self.budget.for_geometry(geometry), *given)
        cache.heap = self.heap
        return cache


def remove_last(view: PagedView, tokens: int) -> None:
    """Forget the last tokens of every row."""
    for seq in view.seqs or ():
        view.cache.truncate(seq, max(view.cache.seq_len(seq) - tokens, 0))
