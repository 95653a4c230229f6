"""Feeding tokens through the exact cache and the candidates' caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvpact.evaluate.base import Candidate, EvaluationError, Progress
from kvpact.recipe import SpecLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CacheFactory = Callable[[Any, Candidate], Any]  # called as ``make_cache(model.config, candidate)``


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


def compressed_cache(model: PreTrainedModel, candidate: Candidate, offsets: bool = True) -> Any:
    """Build the `CompressedCache` of a candidate for a model, with its key offsets or without."""
    from kvpact.integrations.transformers import CompressedCache

    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return CompressedCache(
        model,
        candidate.spec_for_cache(layers),
        exact_new=not candidate.packed_only and candidate.exact_new is not False,
        key_offsets="auto" if offsets else None,
        calibration=candidate.calibration,
        sliding=candidate.sliding_spec(),
        budget=candidate.budget,
    )


def cache_of(model: PreTrainedModel, entry: Candidate, make_cache: CacheFactory | None) -> Any:
    """Build a candidate's cache; `make_cache` stands in for `compressed_cache`."""
    if make_cache is None:
        return compressed_cache(model, entry)
    return make_cache(model.config, entry)


class Steps:
    """Adds up the times that steps take, in any unit; reports ``progress(done, total, what)``."""

    def __init__(self, progress: Progress | None, total: float) -> None:
        self._progress, self._total, self._done = progress, total, 0.0

    def done(self, what: str, weight: float = 1) -> None:
        """Report that `what` took a step."""
        self._done += weight
        if self._progress is not None:
            self._progress(self._done, self._total, what)


def part(progress: Progress | None, begin: float, end: float) -> Progress | None:
    """Return a callback that reports a part of a run with these shares of its time."""
    if progress is None:
        return None
    return lambda done, total, what: progress(begin * total + done * (end - begin), total, what)


def positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a model takes, None where its config does not say."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def entries_of(candidates: Sequence[SpecLike | Candidate], packed_only: bool) -> list[Candidate]:
    """Return candidates for specs, of which there has to be one."""
    if not candidates:
        raise EvaluationError("there is no cache to evaluate; give a spec")
    entries = [c if isinstance(c, Candidate) else Candidate(c, packed_only) for c in candidates]
    # Nothing is packed in an exact cache: packed-only would be the same row again.
    return [replace(e, packed_only=False) if e.label == "none" else e for e in entries]


def chunks(ids: Tensor, chunk: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield position, ids and next tokens of each chunk; the last token has no next one."""
    for start in range(0, len(ids), chunk):
        yield start, ids[start : start + chunk], ids[start + 1 : start + chunk + 1]


def forward(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Return the logits ``[T, V]`` of a chunk after what the cache holds."""
    from kvpact.integrations.transformers.versions import named

    output = model(input_ids=ids[None], use_cache=True, **named(cache))
    logits: Tensor = output.logits[0]
    return logits


def feed(model: PreTrainedModel, ids: Tensor, cache: Any, chunk: int) -> Tensor:
    """Feed tokens, int64 ``[N]``, in chunks; return the logits after the last one, ``[V]``."""
    for _, part, _ in chunks(ids, chunk):
        logits = forward(model, part, cache)
    return logits[-1]
