"""Measures the caches of one contender, or of several side by side, in a process of its own.

Packages install modules of the same names, so each has a folder of its own in PYTHONPATH.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import runner
import torch
from leaderboard_bytes import held_bytes
from leaderboard_contenders import contender
from transformers import DynamicCache, PreTrainedModel

from kvpact.evaluate import MetricAccumulator, score_tokens
from kvpact.evaluate.feed import chunks
from kvpact.integrations.transformers.versions import named

LAST = 64  # tokens given to the model after most were stored: as in the middle of a generation


@dataclass
class Lane:
    """A cache on its way through the work; `failed` is what ended it."""

    contender: str
    name: str
    make: Callable[[PreTrainedModel], Any]
    cache: Any = None
    failed: str = ""
    row: dict[str, Any] = field(default_factory=dict)

    def attempt(self, work: Callable[[], Any]) -> Any:
        """Return what a piece of work returns, None if it raises, which is then the last."""
        try:
            return work()
        except Exception as error:  # a peer may raise anything, and that is its result
            text = str(error).strip().partition("\n")[0]
            self.failed = f"{type(error).__name__}: {text}"[:300]
            self.cache = None
            return None


@dataclass(frozen=True)
class Work:
    """What all contenders are given: a model, a copy of it for the exact cache, and tokens."""

    model: PreTrainedModel
    exact: PreTrainedModel
    ids: torch.Tensor
    tokens: int
    prompt: int
    chunk: int
    contexts: list[int]
    rounds: int


def timed(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, keep: int = 1
) -> tuple[float, torch.Tensor]:
    """Carry out a forward pass; return its seconds on the CPU, and the last logits (0: all).

    On one thread these are the seconds of a quiet machine, whatever else runs on it.
    """
    start = time.process_time()
    found = model(input_ids=ids[None], **named(cache), use_cache=True, logits_to_keep=keep)
    return time.process_time() - start, found.logits[0]


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same weights with a config of its own.

    kvpact's caches set the attention implementation of the model that they are made for.
    """
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})


def running(lanes: list[Lane]) -> list[Lane]:
    """Return the lanes that nothing has ended."""
    return [lane for lane in lanes if not lane.failed]


def begin(lanes: list[Lane], work: Work) -> Any:
    """Give each lane an empty cache; return an exact one."""
    for lane in running(lanes):
        lane.cache = lane.attempt(lambda lane=lane: lane.make(work.model))
    return DynamicCache(config=work.exact.config)


def warm(lanes: list[Lane], work: Work) -> None:
    """Let everybody import, compile and allocate."""
    exact = begin(lanes, work)
    for part in (work.ids[:LAST], work.ids[LAST : 2 * LAST], work.ids[2 * LAST :][:1]):
        timed(work.exact, part, exact)
        for lane in running(lanes):
            lane.attempt(lambda lane=lane, part=part: timed(work.model, part, lane.cache))


def quality(lanes: list[Lane], work: Work) -> None:
    """Score KL as `kvpact eval` does."""
    exact = begin(lanes, work)
    scores = {id(lane): MetricAccumulator() for lane in lanes}
    for start, part, targets in chunks(work.ids[: work.tokens], work.chunk):
        keep = 0 if start else 1  # the first chunk had no stored past to attend to
        _, reference = timed(work.exact, part, exact, keep)
        for lane in running(lanes):
            found = lane.attempt(
                lambda lane=lane, part=part, keep=keep: timed(work.model, part, lane.cache, keep)
            )
            if found is not None and start and len(targets):
                count = len(targets)
                new = score_tokens(reference[:count], found[1][:count], targets)
                scores[id(lane)].add(new)
    for lane in running(lanes):
        summary = scores[id(lane)].summary()
        names = ("kl_mean", "kl_se", "kl_p99", "top1", "perplexity_change")
        lane.row |= {name: summary[name] for name in names}
        if not math.isfinite(lane.row["kl_mean"]):
            lane.failed = "its logits are not finite"


def prompts(lanes: list[Lane], work: Work) -> None:
    """Time a whole prompt in one call, as `generate` gives it, each round on empty caches."""
    ids = work.ids[: work.prompt]
    ratios: dict[int, list[float]] = {id(lane): [] for lane in lanes}
    for _ in range(work.rounds):
        exact = begin(lanes, work)
        spent, _ = timed(work.exact, ids, exact)
        for lane in running(lanes):
            found = lane.attempt(lambda lane=lane: timed(work.model, ids, lane.cache))
            if found is not None:
                ratios[id(lane)].append(found[0] / spent)
    for lane in running(lanes):
        lane.row["prompt"] = list(runner.quartiles(ratios[id(lane)]))


def fill(cache: Any, model: PreTrainedModel, tokens: int) -> None:
    """Store random K and V, layer by layer: time and bytes don't depend on the numbers."""
    config = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        cache.update(k, v, layer)


def steps(lanes: list[Lane], work: Work, context: int) -> None:
    """Time decode steps after a context, in turns with the exact cache; count what is held."""
    exact = begin(lanes, work)
    part, token = work.ids[:LAST], work.ids[LAST : LAST + 1]
    fill(exact, work.exact, context - LAST)
    timed(work.exact, part, exact)
    for lane in running(lanes):
        lane.attempt(lambda lane=lane: fill(lane.cache, work.model, context - LAST))
    for lane in running(lanes):
        lane.attempt(lambda lane=lane: timed(work.model, part, lane.cache))
    times: dict[int, list[tuple[float, float]]] = {id(lane): [] for lane in lanes}
    for turn in range(work.rounds + 1):
        spent, _ = timed(work.exact, token, exact)
        for lane in running(lanes):
            found = lane.attempt(lambda lane=lane: timed(work.model, token, lane.cache))
            if found is not None and turn:  # the first one warms up
                times[id(lane)].append((found[0], spent))
    for lane in running(lanes):
        pairs = times[id(lane)]
        lane.row.setdefault("steps", []).append(
            {
                "tokens": context,
                "ms": 1e3 * statistics.median(ours for ours, _ in pairs),
                "exact_ms": 1e3 * statistics.median(theirs for _, theirs in pairs),
                "ratio": list(runner.quartiles([ours / theirs for ours, theirs in pairs])),
                "bytes": held_bytes(lane.cache),
                "exact_bytes": held_bytes(exact),
            }
        )


def measured(lanes: list[Lane], work: Work) -> None:
    """Take all lanes through all of the work."""
    with torch.no_grad():
        warm(lanes, work)
        quality(lanes, work)
        prompts(lanes, work)
        for context in work.contexts:
            steps(lanes, work, context)


def carried_out(names: list[str], models: list[str], **order: Any) -> dict[str, Any]:
    """Measure contenders on models; return version, rows and failures of each."""
    torch.set_num_threads(1)
    contenders = {name: contender(name) for name in names}
    sizes = {name: order[name] for name in ("tokens", "prompt", "chunk", "contexts", "rounds")}
    found: dict[str, Any] = {
        name: {"version": version(one.package), "rows": [], "failed": []}
        for name, one in contenders.items()
    }
    for name in models:
        model, ids = runner.book(name, max(order["tokens"], order["prompt"]))
        lanes = [
            Lane(who, cache, make)
            for who, one in contenders.items()
            for cache, make in one.caches.items()
        ]
        measured(lanes, Work(model, twin(model), ids[0], **sizes))
        for lane in lanes:
            head = {"model": name, "cache": lane.name}
            if lane.failed:
                found[lane.contender]["failed"].append(head | {"reason": lane.failed})
            else:
                found[lane.contender]["rows"].append(head | lane.row)
    return found
