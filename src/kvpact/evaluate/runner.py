"""Teacher-forced evaluation: one text, in chunks, through the exact and every candidate cache.

A one-shot prefill never reads what a cache has stored and shows nothing. Here each chunk attends
to the past as stored, and to itself as decoding does: exactly where a window holds its tokens, else
as stored (`Candidate.as_decoded`). The exact reference gets the same chunks. All caches advance in
lockstep, so that the logits of two outputs at most exist at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import nan
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpact.callable_package import CallError
from kvpact.data import book_path
from kvpact.errors import SpecError
from kvpact.evaluate import feed
from kvpact.evaluate.base import Candidate, EvalProtocol, EvalRow, Progress
from kvpact.evaluate.metrics import MetricAccumulator, score_tokens
from kvpact.evaluate.result import EvalResult
from kvpact.geometry import check_count
from kvpact.integrations.models import first_tokens, opened
from kvpact.integrations.sizes import length_of
from kvpact.integrations.weights import input_device
from kvpact.methods.fitted import FittedCodec
from kvpact.recipe import SpecLike
from kvpact.spec import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("kvpact", "torch", "transformers")  # distributions whose versions stand in a report
TOKENS = 2305  # of which 2,048 are scored: the first chunk of 256 and the last token are not


def evaluate(
    model: PreTrainedModel,
    token_ids: Tensor,
    candidates: Sequence[SpecLike | Candidate],
    *,
    chunk: int = 256,
    packed_only: bool = False,
    progress: Progress | None = None,
    model_name: str = "",
    text_name: str = "",
    seed: int = 0,
    make_cache: feed.CacheFactory | None = None,
    exact_row: bool = True,
) -> EvalResult:
    """Measure what each cache costs in quality on given tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, in evaluation mode.
    token_ids : Tensor
        int64 ``[N]``.
    candidates : sequence of str, Spec, path, mapping or Candidate
        ``none`` is put in front where it is not among them, unless `exact_row` is false.
    chunk : int
        Tokens fed at a time; the first chunk is left out of every metric.
    packed_only : bool
        Attend to packed slots alone: no sinks, no window, new tokens as stored. For candidates
        that are no `Candidate` already.
    progress : callable, optional
        ``progress(done, total, what)`` after each forward pass.
    model_name, text_name : str
        For the report.
    seed : int
        For the report: of what was drawn (tasks); nothing is drawn here.
    make_cache : callable, optional
        ``make_cache(model.config, candidate)`` instead of `CompressedCache`.

    Raises
    ------
    EvaluationError
        Too few tokens for the chunk, more tokens than the model has positions, a chunk below 1.
    SpecError
        A candidate is no spec or recipe.
    """
    from transformers import DynamicCache

    entries = feed.entries_of(candidates, packed_only)
    if exact_row and all(entry.label != "none" for entry in entries):
        entries.insert(0, Candidate("none"))
    feed.check_sizes(len(token_ids), chunk, feed.positions(model))
    check_count("seed", seed)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    entries = [entry.as_decoded(layers, chunk) for entry in entries]
    specs = [entry.layers(layers) for entry in entries]
    caches = [feed.cache_of(model, entry, make_cache) for entry in entries]
    reference = DynamicCache(config=model.config)
    scores = [MetricAccumulator() for _ in entries]
    seconds = [0.0] * len(entries)
    steps = feed.Steps(progress, -(-len(token_ids) // chunk) * (1 + len(entries)))

    with torch.inference_mode():
        for start, ids, targets in feed.chunks(token_ids.to(input_device(model)), chunk):
            exact = feed.forward(model, ids, reference)
            steps.done("exact reference")
            for i, cache in enumerate(caches):
                begin = time.perf_counter()
                logits = feed.forward(model, ids, cache)
                seconds[i] += time.perf_counter() - begin
                if start and len(targets):  # the first chunk had no stored past to attend to
                    count = len(targets)
                    scores[i].add(score_tokens(exact[:count], logits[:count], targets))
                del logits
                steps.done(entries[i].label)
            del exact

    measured = zip(entries, specs, caches, scores, seconds, strict=True)
    rows = [_row(*one, reference) for one in measured]
    return EvalResult(
        rows,
        EvalProtocol(
            tokens=len(token_ids),
            chunk=chunk,
            scored=len(scores[0].scores().kl),
            reference_perplexity=scores[0].summary()["reference_perplexity"],
            model=model_name or str(getattr(model.config, "_name_or_path", "")),
            text=text_name,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(input_device(model)),
            threads=torch.get_num_threads(),
            seed=seed,
            versions={name: installed(name) or "not installed" for name in PACKAGES},
        ),
        scores=tuple(score.scores() for score in scores),
    )


def evaluate_text(
    model: PreTrainedModel | str | PathLike[str],
    specs: SpecLike | Candidate | Sequence[SpecLike | Candidate],
    text: str | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokens: int | str = TOKENS,
    chunk: int = 256,
    **options: Any,
) -> EvalResult:
    """Measure what caches cost in quality on a text: ``kvpact.evaluate(model, specs, text)``.

    Parameters
    ----------
    model : PreTrainedModel, str or path
        A model, with its `tokenizer`, or what `load_model` loads.
    specs : str, Spec, path, mapping, Candidate or a sequence of them
        The caches; ``none`` is put in front.
    text : str, optional
        Plain text; the shipped excerpt of a book if omitted.
    tokenizer : PreTrainedTokenizerBase, optional
        Not needed where the model is named.
    tokens : int or str
        Tokens to use (``2k``), of which 2,048 are scored if omitted; a shorter text is used whole.
    chunk, options
        See `evaluate`.

    Raises
    ------
    KVPactError
        As `evaluate`, before the text is tokenised; no such model, or no tokenizer for it.
    """
    if hasattr(specs, "convert_tokens_to_ids"):
        line = "kvpact.evaluate(model, 'trellis:bits=4', text, tokenizer=tokenizer)"
        raise SpecError(f"the second argument is a spec, not a tokenizer; write: {line}")
    own, more = (function.__kwdefaults__ or {} for function in (evaluate_text, evaluate))
    if unknown := sorted(options.keys() - more.keys()):
        line = f"kvpact.evaluate(model, specs, text, {'=..., '.join(own | more)}=...)"
        raise CallError(f"evaluate has no option {unknown[0]!r}; write: {line}")
    network, tokenizer = opened(model, tokenizer)
    tokens = length_of(tokens)
    feed.check_sizes(tokens, chunk, feed.positions(network))
    text = book_path().read_text("utf-8") if text is None else text
    one = isinstance(specs, str | Spec | PathLike | Mapping | Candidate)
    candidates: Any = [specs] if one else specs
    ids = first_tokens(tokenizer, text, tokens)
    return evaluate(network, ids, candidates, chunk=chunk, **options)


def _row(
    entry: Candidate,
    specs: list[Spec],
    cache: Any,
    scores: MetricAccumulator,
    seconds: float,
    reference: Any,
) -> EvalRow:
    stats = cache.stats()
    measured: dict[str, Any] = scores.summary()
    del measured["reference_perplexity"]
    sides = [side for spec in specs for side in (spec.key, spec.value)]
    return EvalRow(
        **measured,
        spec=entry.label,
        bits_per_value=stats["bits_per_value"],
        bytes=stats["bytes"]["total"],
        seconds=seconds,
        slot_bits_per_value=stats["slot_bits_per_value"] or nan,
        sinks=max(side.sinks for side in sides),
        window=max(side.window for side in sides),
        packed_only=entry.packed_only,
        layers_compressed=stats["layers"]["compressed"],
        layers_native=stats["layers"]["native"],
        **coverage(reference, cache, specs),
        fitted=any(learns(spec) for spec in specs),
        exact_new=entry.exact_new is not False,
    )


def coverage(reference: Any, cache: Any, specs: Sequence[Spec]) -> dict[str, Any]:
    """Return the bytes of the exact cache, and those that a cache takes over, as in `EvalRow`.

    Bounded states (windows, chunked and linear attention) stay exact, and ``none`` covers nothing.
    """
    from kvpact.integrations.transformers.engine_cache import tensors_of
    from kvpact.integrations.transformers.layers.full import CompressedLayer

    sizes = {"exact_bytes": 0, "covered_bytes": 0, "native_bytes": 0}
    parts = {"unused": 0, "sinks": 0, "window": 0, **cache.stats()["bytes"]}
    exacts, kept, own = list[Tensor](), list[Tensor](), 0.0
    for exact, held, spec in zip(reference.layers, cache.layers, specs, strict=True):
        exacts += tensors_of(exact)
        sizes["native_bytes"] += sum(tensor.nbytes for tensor in tensors_of(held))
        own += _in_16_bits(tensors_of(held))
        if isinstance(held, CompressedLayer):
            sides = ((exact.keys, spec.key), (exact.values, spec.value))
            sizes["covered_bytes"] += sum(x.nbytes for x, method in sides if method.name != "none")
            kept += [x for x, method in sides if method.name == "none"]
    sizes["exact_bytes"] = sum(tensor.nbytes for tensor in exacts)
    wider = sizes["exact_bytes"] / _in_16_bits(exacts)
    exact_tokens = parts["sinks"] + parts["window"]
    packed = parts["total"] - parts["unused"] - exact_tokens - sum(x.nbytes for x in kept)
    own += max(packed, 0) + exact_tokens / wider + _in_16_bits(kept)
    return {**sizes, "share": own / _in_16_bits(exacts)}


def _in_16_bits(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of tensors whose floating-point numbers have 16 bits."""
    return sum(x.nbytes / (x.itemsize / 2 if x.is_floating_point() else 1) for x in tensors)


def learns(spec: Spec) -> bool:
    """Return whether a codec of a spec learns from tokens; width and dtype are of no account."""
    return any(isinstance(codec, FittedCodec) for codec in spec.codecs(64, 64, torch.float32))


def installed(name: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
