"""Teacher-forced evaluation: one text, in chunks, through the exact and every candidate cache.

A one-shot prefill never reads what a cache has stored and shows nothing. Here each chunk attends
to itself exactly and to the past as stored, and the exact reference is chunked alike. All caches
advance in lockstep, so that the logits of two outputs at most exist at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpact.evaluate.base import (
    Candidate,
    EvalProtocol,
    EvalResult,
    EvalRow,
    EvaluationError,
    Progress,
    exact_tokens,
)
from kvpact.evaluate.metrics import MetricAccumulator, score_tokens
from kvpact.methods.fitted import FittedMethod
from kvpact.recipe import SpecLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CacheFactory = Callable[[Any, Candidate], Any]


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
    make_cache: CacheFactory | None = None,
) -> EvalResult:
    """Measure what each cache costs in quality on given tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, in evaluation mode.
    token_ids : Tensor
        int64 ``[N]``.
    candidates : sequence of str, Spec, path, mapping or Candidate
        ``none`` is put in front where it is not among them.
    chunk : int
        Tokens fed at a time; the first chunk is left out of every metric.
    packed_only : bool
        Attend to packed slots alone: no sinks, no window, new tokens as stored. For candidates
        that are no `Candidate` already.
    progress : callable, optional
        ``progress(done, total, what)`` after each forward pass.
    model_name, text_name : str
        For the report.
    make_cache : callable, optional
        ``make_cache(model.config, candidate)`` instead of `CompressedCache`.

    Returns
    -------
    EvalResult
        A row a candidate, in their order.

    Raises
    ------
    EvaluationError
        Too few tokens for the chunk, more tokens than the model has positions, a chunk below 1.
    SpecError
        A candidate is no spec or recipe.
    """
    from transformers import DynamicCache

    entries = _entries(candidates, packed_only)
    check_sizes(len(token_ids), chunk, _positions(model))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    specs = [entry.layers(layers) for entry in entries]
    build = make_cache or compressed_cache
    caches = [build(model.config, entry) for entry in entries]
    reference = DynamicCache(config=model.config)
    scores = [MetricAccumulator() for _ in entries]
    seconds = [0.0] * len(entries)
    steps = _Steps(progress, -(-len(token_ids) // chunk) * (1 + len(entries)))

    with torch.inference_mode():
        for start, ids, targets in _chunks(token_ids.to(model.device), chunk):
            exact = _forward(model, ids, reference)
            steps.done("exact reference")
            for i, cache in enumerate(caches):
                begin = time.perf_counter()
                logits = _forward(model, ids, cache)
                seconds[i] += time.perf_counter() - begin
                if start and len(targets):  # the first chunk had no stored past to attend to
                    count = len(targets)
                    scores[i].add(score_tokens(exact[:count], logits[:count], targets))
                del logits
                steps.done(entries[i].label)
            del exact

    rows = [
        _row(entry, spec, cache, score, spent)
        for entry, spec, cache, score, spent in zip(
            entries, specs, caches, scores, seconds, strict=True
        )
    ]
    summary = scores[0].summary()
    return EvalResult(
        rows,
        EvalProtocol(
            tokens=len(token_ids),
            chunk=chunk,
            scored=summary.scored,
            reference_perplexity=summary.reference_perplexity,
            model=model_name or str(getattr(model.config, "_name_or_path", "")),
            text=text_name,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            threads=torch.get_num_threads(),
            versions={
                name: installed(name) or "not installed"
                for name in ("kvpact", "torch", "transformers")
            },
        ),
    )


def evaluate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    candidates: Sequence[SpecLike | Candidate],
    *,
    tokens: int = 2048,
    chunk: int = 256,
    **options: Any,
) -> EvalResult:
    """Tokenise the beginning of a text and `evaluate` on it.

    Parameters
    ----------
    model, tokenizer
        As `kvpact.integrations.models.load_model` gives them.
    text : str
        Plain text.
    candidates, chunk, options
        See `evaluate`.
    tokens : int
        Tokens to use; a shorter text is used whole.

    Raises
    ------
    EvaluationError
        As `evaluate`; sizes are checked before the text is tokenised.
    """
    check_sizes(tokens, chunk, _positions(model))
    # Tokens are far shorter than 32 characters on average: a long book is not tokenised whole.
    ids = tokenizer(text[: 32 * tokens], truncation=True, max_length=tokens)["input_ids"]
    return evaluate(model, torch.tensor(ids), candidates, chunk=chunk, **options)


def check_sizes(tokens: int, chunk: int, limit: int | None = None) -> None:
    """Raise `EvaluationError` unless something can be scored within `limit` positions."""
    if chunk < 1:
        raise EvaluationError(f"chunk {chunk} is not possible; take 1 or more, 256 is usual")
    if tokens < chunk + 2:
        raise EvaluationError(
            f"{tokens} tokens give nothing to score, the first chunk of {chunk} is left out; "
            f"give a longer text, at least {chunk + 2} tokens, or a smaller chunk"
        )
    if limit is not None and tokens > limit:
        raise EvaluationError(
            f"{tokens} tokens are more than the model's {limit} positions; take at most {limit}"
        )


def compressed_cache(config: Any, candidate: Candidate) -> Any:
    """Build the `CompressedCache` of a candidate for a model's config."""
    from kvpact.integrations.transformers import CompressedCache

    layers = config.get_text_config(decoder=True).num_hidden_layers
    return CompressedCache(
        config, candidate.spec_for_cache(layers), exact_new=not candidate.packed_only
    )


class _Steps:
    """Counts steps and reports them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def done(self, what: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, what)


def _positions(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _entries(candidates: Sequence[SpecLike | Candidate], packed_only: bool) -> list[Candidate]:
    entries = [c if isinstance(c, Candidate) else Candidate(c, packed_only) for c in candidates]
    # Nothing is packed in an exact cache: packed-only would be the same row again.
    entries = [replace(e, packed_only=False) if e.label == "none" else e for e in entries]
    if all(entry.label != "none" for entry in entries):
        entries.insert(0, Candidate("none"))
    return entries


def _chunks(ids: Tensor, chunk: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield position, ids and next tokens of each chunk; the last token has no next one."""
    for start in range(0, len(ids), chunk):
        yield start, ids[start : start + chunk], ids[start + 1 : start + chunk + 1]


def _forward(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Return the logits ``[T, V]`` of a chunk after what the cache holds."""
    output = model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    logits: Tensor = output.logits[0]
    return logits


def _row(
    entry: Candidate, specs: list[Any], cache: Any, scores: MetricAccumulator, seconds: float
) -> EvalRow:
    stats, metrics = cache.stats(), scores.summary()
    measured = ["perplexity", "perplexity_change", "perplexity_change_se", "top1"]
    measured += ["kl_mean", "kl_median", "kl_p99", "kl_max"]
    return EvalRow(
        **{name: getattr(metrics, name) for name in measured},
        spec=entry.label,
        bits_per_value=stats["bits_per_value"],
        bytes=cache.memory_usage(),
        seconds=seconds,
        slot_bits_per_value=stats["slot_bits_per_value"],
        sinks=exact_tokens(specs, "sinks"),
        window=exact_tokens(specs, "window"),
        packed_only=entry.packed_only,
        layers_compressed=stats["layers"]["compressed"],
        layers_native=stats["layers"]["native"],
        fitted=any(isinstance(m, FittedMethod) for s in specs for m in (s.key, s.value)),
    )


def installed(name: str) -> str | None:
    """Return the version of a distribution, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
