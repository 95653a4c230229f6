"""`CompressedCache`: transformers' `Cache` with full-attention layers compressed."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from os import PathLike
from typing import Any, Literal, Self
from weakref import ref

import torch
from transformers import PreTrainedModel

from kvpact.cache import ContiguousCache
from kvpact.cache.checks import state_of
from kvpact.cache.stats import Summary, cache_stats, spec_text
from kvpact.calibration import Calibration
from kvpact.callable_package import Figures, tells_names
from kvpact.errors import BackendUnavailable, GeometryError, KVPactError, SnapshotError, SpecError
from kvpact.files import check_path, is_of_others
from kvpact.integrations.transformers import versions
from kvpact.integrations.transformers.engine_cache import may_cross_attend, tensors_of
from kvpact.integrations.transformers.evict import Evicting
from kvpact.integrations.transformers.held.calls import BEFORE, PLAIN
from kvpact.integrations.transformers.held.gaps import gaps_of
from kvpact.integrations.transformers.held.shared import BatchCache, SharedState
from kvpact.integrations.transformers.layers.engine_layers import (
    CrossAttentionLayer,
    checked,
    restore_records,
)
from kvpact.integrations.transformers.layers.entries import EntriesLayer, entries_class
from kvpact.integrations.transformers.layers.full import CompressedHybridLayer, CompressedLayer
from kvpact.integrations.transformers.layers.indexed import CompressedIndexedLayer
from kvpact.integrations.transformers.layers.made_keys import (
    CompressedValueLayer,
    check_positions,
    key_makers,
)
from kvpact.integrations.transformers.layers.rings import restored_rings, ring_spec
from kvpact.integrations.transformers.layers.sliding import CompressedSlidingLayer, rings_of
from kvpact.integrations.transformers.model.budget import model_budget
from kvpact.integrations.transformers.model.facts import (
    CROSS,
    ENTRIES,
    INDEXED,
    SLIDING,
    check_heads,
    layer_facts,
)
from kvpact.integrations.transformers.model.fallback import warn
from kvpact.integrations.transformers.model.guesses import CACHE_MEANT, config_of, meant_spec
from kvpact.integrations.transformers.model.offsets import offsets_of
from kvpact.integrations.weights import input_device
from kvpact.kernels import Compute, choose
from kvpact.key_offset import KeyOffset
from kvpact.recipe import SpecLike, layer_specs
from kvpact.snapshot import LayerState, Snapshot
from kvpact.snapshot.state import CacheState
from kvpact.spec import OMITTED, Omitted, Spec


class _NoMaximum(KVPactError, AttributeError):
    """`max_cache_len` was asked for: `hasattr` says no, and the message says what to do."""


@tells_names(
    CACHE_MEANT, "CompressedCache(model, spec, exact_new=..., calibration=..., budget=...)"
)
class CompressedCache(Evicting):
    """A compressed KV cache for `model(…, cache=cache)` and `model.generate`.

    Full-attention layers are compressed; all others (sliding, chunked, linear, …) keep
    transformers' own cache layer. Attention goes over the packed slots if the model's attention
    implementation is ``kvpact``; any other sees decompressed K and V, which is right but slower.

    Models with latent attention (MLA: DeepSeek V2 and V3, …) cache a latent in K's place and the
    rotated part of the key in V's: the spec's method for K stores the latent, and 8-bit integers
    the rotated part unless the spec names a method for it after the slash. Attention goes over the
    latents with the projections absorbed, without expanding them.

    Encoder-decoder models want ``EncoderDecoderCache(CompressedCache(…), DynamicCache(…))``: the
    cross-attention's K and V never grow. Given the `CompressedCache` alone, they are refused. A
    cache can't be pickled (take a `snapshot`); `deepcopy` shares what neither side changes.

    Parameters
    ----------
    model : PreTrainedModel or PreTrainedConfig
        The model, or its config. Of a config nobody knows the weights: keys with a large bias then
        lose precision below 8 bits, and a warning says so once.
    spec : str, Spec, path or mapping
        A spec, or a recipe with a spec per layer (of the model's layers). `DEFAULT_SPEC` is
        very close on all models that it was measured on.
    bits : int, optional
        Of the default method, in place of a spec.
    attention : {"auto", "keep"}
        ``auto`` sets the config's attention implementation to ``kvpact`` where it is ``sdpa``; for
        every other cache that does exactly what ``sdpa`` does, and the config is as before when
        the last cache made for it is gone. ``keep`` leaves the config alone.
    exact_new : bool
        Whether new tokens are attended as given or as stored (see `AttendConfig`).
    backend, check : str
        Who computes, and when tokens are checked (see `create_cache`). On a GPU take
        ``check="deferred"``, with which no step makes the host wait, and call `verify` at the end.
    key_offsets : {"auto"}, mapping or None
        What keys have by their positions alone, by layer of the model (see `create_cache`):
        ``auto`` reads it from the model's weights (`key_offsets`), None leaves keys as they are.
    calibration : Calibration or path, optional
        What methods that learn from tokens learnt of this model (``kvpact calibrate``), by layer of
        the model. Without it, they learn from the first tokens.
    k_eq_v : bool
        Whether layers whose keys are made of their values (Gemma 4's full layers with
        ``attention_k_eq_v``) hold the values alone, by the spec's method for V: half as many bytes.
        Steps then decompress the values and make the keys, which takes longer. A warning says so
        where the first call's keys are other ones, as with positions that don't follow one another;
        K and V are held apart then. A later call of such positions is refused. A snapshot does not
        tell the weights that make keys: name the model in its `identity`.
    sliding : str or Spec, optional
        Pack layers with sliding attention, too, by this spec, without sinks; what methods learn of
        them they learn from the first tokens. They drop tokens that no query will see. If
        omitted, they stay as transformers caches them, exact.
    budget : int or str, optional
        Bytes (``"200MB"``) that the cache never exceeds, all layers together; or a share
        (``"25%"``) of the 16-bit cache of `context` tokens. It begins exact, or with a named
        spec, and takes fewer bits, layer by layer, as the context grows (see `create_cache`).
    rungs : sequence of specs, optional
        The ladder of a budget, from the most bytes to the fewest.
    context : int, optional
        Tokens at which a budget is a share of the exact cache.

    Raises
    ------
    SpecError
        The spec, `attention` or an option is not known; no layer makes keys of values.
    FormatError, IntegrityError
        The calibration is damaged.
    KVPactError
        A layer type is not known, or no layer can be compressed.
    """

    def __init__(
        self,
        model: PreTrainedModel | versions.PreTrainedConfig | None = None,
        spec: SpecLike = OMITTED,
        *,
        attention: str = "auto",
        exact_new: bool = True,
        backend: str = "auto",
        check: str = "now",
        key_offsets: Mapping[int, KeyOffset] | Literal["auto"] | None = "auto",
        calibration: Calibration | str | PathLike[str] | None = None,
        k_eq_v: bool = False,
        sliding: str | Spec | None = None,
        budget: int | str | None = None,
        rungs: Sequence[SpecLike] | None = None,
        context: int | None = None,
        **bits: Any,
    ) -> None:
        model = bits.pop("config", model) if model is None else model
        config = config_of(type(self).__name__, model, spec)
        spec = meant_spec(type(self).__name__, spec, bits)
        decoder = config.get_text_config(decoder=True)
        facts = layer_facts(decoder)
        specs, compressed = layer_specs(spec, len(facts.types)), facts.compressed()
        kept = [specs[layer] for layer in compressed]
        offsets = offsets_of(model, specs, compressed, key_offsets)
        if not isinstance(calibration, Calibration | None):
            calibration = Calibration.load(calibration)
        if calibration is not None:
            calibration = calibration.select(compressed).needed(kept)
            calibration = calibration.to(input_device(model))
        compute, given = choose(backend, check), None
        if budget is not None or rungs is not None or context is not None:
            first = None if isinstance(spec, Omitted) else spec
            given = model_budget(config, facts, budget, first, rungs, context)
            given.refuse(calibration=calibration, k_eq_v=k_eq_v, sliding=sliding)
            kept = list(given.rungs[0])
        shared = SharedState(decoder, exact_new, kept, compute, offsets, calibration, budget=given)
        for name, value in (("k_eq_v", k_eq_v), ("exact_new", exact_new)):
            if type(value) is not bool:
                raise SpecError(f"{name} should be True or False, not {value!r}")
        full = [i for i in compressed if facts.types[i] == "full_attention"]
        makers = key_makers(model, full) if k_eq_v else {}
        if makers and backend not in ("auto", "torch"):
            raise BackendUnavailable("keys made of values are torch's to multiply: use 'auto'")
        crosses = may_cross_attend(config, decoder)
        slide = [layer for layer, kind in enumerate(facts.types) if kind == SLIDING]
        offsets = offsets_of(model, specs, slide, None if sliding is None else key_offsets)
        rings = rings_of(sliding, shared, facts, crosses, offsets)
        indices, ring = count(), count()
        layers: list[Any] = []
        for index, (kind, more) in enumerate(zip(facts.types, facts.options, strict=True)):
            if index in compressed:
                own: Any = CompressedIndexedLayer if kind in INDEXED else CompressedLayer
                own = CompressedHybridLayer if kind == "hybrid" else own
                if kind in ENTRIES:
                    own = entries_class(versions.LAYER_CLASSES[kind])
                if index in makers:
                    own, more = CompressedValueLayer, {"keys": makers[index]}
                layers.append(own(shared, next(indices), **more))
                layers[-1].read_again = index in facts.read_again
            elif kind == SLIDING and rings.specs:
                layers.append(CompressedSlidingLayer(rings, next(ring), **more))
                layers[-1].read_again = index in facts.read_again
            else:
                plain = CrossAttentionLayer if kind == CROSS else versions.LAYER_CLASSES[kind]
                layers.append(plain(**more))
        super().__init__(layers, shared, attention, crosses, facts.sparse, rings)
        self._model = ref(model) if isinstance(model, torch.nn.Module) else None
        self._dropped_at = versions.drops_cache_at(decoder)

    def __bool__(self) -> bool:
        """Return False where Phi-3's `generate` may drop the cache, and warn of the loss."""
        if self._dropped_at is None:
            return True
        # An empty cache is none to drop.
        held, caller = self.get_seq_length(), sys._getframe(1)
        if 0 < held <= self._dropped_at and caller.f_code.co_name.startswith("prepare_inputs"):
            ids = caller.f_locals.get("input_ids")
            if ids is not None and ids.shape[1] > self._dropped_at:
                warn(
                    f"this model's rotation switches factors after {self._dropped_at:,} tokens: "
                    f"`generate` drops the compressed cache with its {held:,} tokens and goes on "
                    "with an exact one. Call generate again with all tokens and a new cache, which "
                    "is kept"
                )
        return held > 0

    @property
    def max_cache_len(self) -> int:
        """Always refused; a compressed cache has no maximum."""
        raise _NoMaximum(
            "a compressed cache has no max_cache_len. PEFT's prefix tuning asks for it, to put a "
            "cache of its own in the place of an empty one, so that nothing would be compressed: "
            "run prefix tuning without a cache"
        )

    def save(self, path: str | PathLike[str], *, force: bool = False, **more: Any) -> None:
        """Write a snapshot as a file, which `load` reads; `more` and errors are of `snapshot`.

        An earlier snapshot is replaced; any other file is with `force`, else a `SnapshotError`.
        """
        if not force and is_of_others(path, Snapshot.open):
            raise SnapshotError(f"{path} is no snapshot: save to another path, or with force=True")
        self.snapshot(**more).save(path)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Any, **options: Any) -> Self:
        """Return a new cache of a model, of the file's specs, that goes on where `save` was called.

        `options` are more of `CompressedCache`, as the saved one was made with: `budget`, `k_eq_v`.
        Errors are those of `Snapshot.open`, of `CompressedCache` and of `restore`.
        """
        check_path(path)
        config_of("CompressedCache", model, "")
        held = Snapshot.open(path)
        given = {"sliding": ring_spec(held.records())}
        given |= {} if held.manifest.version > 1 else {"key_offsets": None}  # from before these
        given |= {} if options.get("budget") else {"spec": recipe_of(held, model)}
        cache = cls(model, **given | options)
        cache.restore(held, device=input_device(model))
        return cache

    def restore(self, snapshot: Snapshot, *, device: torch.device | str = "cpu") -> None:
        """Hold what a snapshot holds, from whichever layout, on the model's `device`.

        Errors of `TransformersCache.restore`; `GeometryError` where the snapshot lacks what layers
        hold that transformers caches itself; the cache is as before then.
        """
        self.restore_state(state_of(snapshot), device)

    def restore_state(self, state: CacheState, device: torch.device | str) -> None:
        """Restore a state; see `restore`."""
        geometry = state.geometry
        shared, layers = self._shared, len(self._shared.specs)
        if geometry.num_layers != layers:
            layout = f"{geometry.num_layers} layers, the model compresses {layers}"
            raise GeometryError(f"{layout}: restore it to a cache of the model that it was of")
        for held in self._caches():
            mine = replace(held.geometry, dtype=geometry.dtype)
            if mine != geometry:
                raise GeometryError(f"the snapshot is of {geometry}, the model's cache of {mine}")
        check_heads(shared.config, geometry)
        tokens = state.tokens
        gaps, records = gaps_of(state.records, tokens)
        kept = (x for x in self.layers if not isinstance(x, CompressedSlidingLayer))
        kept = (x for x in kept if isinstance(x, CompressedLayer | EntriesLayer))

        def checked_layers() -> Iterator[LayerState]:
            for layer, held in zip(kept, state.layers, strict=True):
                if isinstance(layer, EntriesLayer):
                    layer.check_entries(held.length, tokens)
                elif (records or gaps.ranges) and held.length != tokens - gaps.gone:
                    raise GeometryError(
                        f"the snapshot's records stand at {tokens} tokens, a layer at {held.length}"
                    )
                yield held

        if (spec := ring_spec(records)) is not None and not self._rings.specs:
            raise GeometryError(
                f"the snapshot's windows are packed: make the cache with sliding={str(spec)!r}"
            )
        own = self.own_by_index()
        check_positions(own, records, geometry, tokens)
        packed = [i for i, x in own.items() if isinstance(x, CompressedSlidingLayer)]
        theirs = [record for record in records if record.layer in packed]
        rings = restored_rings(self._rings, packed, theirs, tokens, device)
        own = {i: x for i, x in own.items() if i not in packed}
        records = checked(own, [x for x in records if x.layer not in packed], tokens, device)
        whole = shared.new_cache(geometry)
        whole.restore_state(state._replace(layers=checked_layers(), records=()), device)
        self._order.forget()
        shared.hold(whole if tokens else None, layers)
        shared.open(gaps)
        shared.call_log.note(0, tokens, reason=BEFORE if gaps.odd else PLAIN)
        self._rings.hold(rings, len(packed))
        restore_records(own, records)

    def _all_caches(self) -> list[BatchCache]:
        return [*self._caches(), *self._rings.stored()]

    def verify(self) -> None:
        """Read the flags of checks that were deferred.

        Raises
        ------
        NonFiniteError
            A token that was stored is NaN, infinite or beyond the method's range.
        """
        for cache in self._all_caches():
            cache.verify()

    def memory_usage(self) -> int:
        """Bytes held by all layers: packed slots, windows, states and an index."""
        return sum(cache.memory_usage() for cache in self._all_caches()) + self._own_bytes()

    def _own_bytes(self) -> int:
        return sum(tensor.nbytes for x in self._own_layers() for tensor in tensors_of(x))

    def _summary(self) -> Summary:
        rings = self._rings  # what waits is counted and not stored: repr changes nothing
        parts = [cache._summary() for cache in self._shared.caches()]
        for cache in rings.caches():  # exact ones are as long as seen
            part = cache._summary()
            kept = min(rings.window - 1, part.tokens)
            parts.append(part._replace(exact=part.exact * kept // max(part.tokens, 1)))
        waiting = [x for x in [*self._shared.waiting, *rings.waiting] if x is not None]
        more = sum(x.k.nbytes + x.v.nbytes for x in waiting)
        more += self._own_bytes()
        made = sum(x.v.nbytes for x in waiting if not x.k.shape[3])
        rows = max([part.rows for part in parts] + [x.k.shape[0] for x in waiting], default=0)
        counts = [getattr(layer, "cumulative_length", 0) for layer in self._own_layers()]
        counts += [part.tokens for part in parts] + [x.total for x in waiting]
        nbytes = more + sum(x.nbytes for x in parts)
        exact = more + made + sum(x.exact for x in parts)
        spec = parts[0].spec if len(parts) == 1 else spec_text(self._shared.specs)
        return Summary(spec, rows, max(counts, default=0), nbytes, exact)

    def stats(self) -> dict[str, Any]:
        """Return what the compressed layers hold (see `kvpact.cache.stats`).

        ``layers`` counts ``compressed`` layers and ``native`` ones, which transformers caches
        itself. ``own_bytes`` are those of windows, states and the keys of an index, which are in no
        other figure.
        """
        self._all_caches()  # what waits is stored
        held = [*enumerate(self._shared.held), *enumerate(self._rings.held)]
        layers = [x.entry(i) for i, x in held if isinstance(x, ContiguousCache)]
        compressed = len(held)
        counts = Figures(compressed=compressed, native=len(self.layers) - compressed)
        stats = cache_stats(layers, ContiguousCache.layout, self._shared.compute or Compute())
        own: dict[str, Any] = {"own_bytes": self._own_bytes(), "layers": counts}
        if self._shared.budget is not None:
            known = [x.stats()["budget"] for x in self._caches()]
            own["budget"] = known[0] if known else {"bytes": self._shared.budget.bytes}
        summary = self._summary()
        return Figures({**stats, "spec": summary.spec, "tokens": summary.tokens, **own})


def recipe_of(held: Snapshot, model: Any) -> Any:
    """Return a snapshot's specs as a recipe for the layers of its model, or of a config."""
    config = getattr(model, "config", model)
    specs = [Spec.from_json(layer.spec) for layer in held.manifest.layers]
    layers = layer_facts(config.get_text_config(decoder=True)).compressed()
    return {"default": specs[0], "layers": dict(zip(layers, specs, strict=False))}
