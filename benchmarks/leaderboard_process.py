"""Measures the caches of contenders, in a process of its own.

Packages install modules of the same names, so each has a folder of its own in PYTHONPATH.
"""

import math
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

Timed = tuple[float, torch.Tensor]
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


def timed(model: PreTrainedModel, ids: torch.Tensor, cache: Any, keep: int = 1) -> Timed:
    """Carry out a forward pass; return its seconds on the CPU, and the last logits (0: all).

    On one thread these are the seconds of a quiet machine, whatever else runs on it.
    """
    start = time.process_time()
    found = model(input_ids=ids[None], **named(cache), use_cache=True, logits_to_keep=keep)
    return time.process_time() - start, found.logits[0]


def all_timed(
    lanes: list[Lane], work: Work, exact: Any, ids: torch.Tensor, keep: int = 1
) -> tuple[Timed, dict[int, Timed]]:
    """Carry out a forward pass on the exact cache, then on each lane that nothing has ended."""
    first, found = timed(work.exact, ids, exact, keep), {}
    for lane in running(lanes):
        each = lane.attempt(lambda lane=lane: timed(work.model, ids, lane.cache, keep))
        if each is not None:
            found[id(lane)] = each
    return first, found


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
        all_timed(lanes, work, exact, part)


def quality(lanes: list[Lane], work: Work) -> None:
    """Score KL as `kvpact eval` does."""
    exact = begin(lanes, work)
    scores = {id(lane): MetricAccumulator() for lane in lanes}
    for start, part, targets in chunks(work.ids[: work.tokens], work.chunk):
        keep, count = 0 if start else 1, len(targets)  # the first chunk has no past to attend to
        (_, reference), found = all_timed(lanes, work, exact, part, keep)
        for place, (_, logits) in found.items() if start and count else ():
            scores[place].add(score_tokens(reference[:count], logits[:count], targets))
    for lane in running(lanes):
        summary = scores[id(lane)].summary()
        names = ("kl_mean", "kl_se", "kl_p99", "top1", "perplexity_change")
        lane.row |= {name: summary[name] for name in names}
        if not math.isfinite(lane.row["kl_mean"]):
            lane.failed = "its logits are not finite"


def prompts(lanes: list[Lane], work: Work) -> None:
    """Time a whole prompt in one call, as `generate` gives it, each round on empty caches."""
    ratios: dict[int, list[float]] = {id(lane): [] for lane in lanes}
    for _ in range(work.rounds):
        (spent, _), found = all_timed(lanes, work, begin(lanes, work), work.ids[: work.prompt])
        for place, (seconds, _) in found.items():
            ratios[place].append(seconds / spent)
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
    fill(exact, work.exact, context - LAST)
    for lane in running(lanes):
        lane.attempt(lambda lane=lane: fill(lane.cache, work.model, context - LAST))
    all_timed(lanes, work, exact, work.ids[:LAST])
    times: dict[int, list[tuple[float, float]]] = {id(lane): [] for lane in lanes}
    for turn in range(work.rounds + 1):
        (spent, _), found = all_timed(lanes, work, exact, work.ids[LAST : LAST + 1])
        for place, (seconds, _) in found.items() if turn else ():  # the first one warms up
            times[place].append((seconds, spent))
    for lane in running(lanes):
        ours, theirs = zip(*times[id(lane)], strict=True)
        ms = runner.medians({"ms": ours, "exact_ms": theirs})
        nbytes = {"bytes": held_bytes(lane.cache), "exact_bytes": held_bytes(exact)}
        row = {"tokens": context, **ms, "ratio": list(runner.ratios(ours, theirs)), **nbytes}
        lane.row.setdefault("steps", []).append(row)


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
        work = Work(model, runner.twin(model), ids[0], **sizes)
        with torch.no_grad():
            for part in (warm, quality, prompts):
                part(lanes, work)
            for context in work.contexts:
                steps(lanes, work, context)
        for lane in lanes:
            head = {"model": name, "cache": lane.name}
            kind, more = ("failed", {"reason": lane.failed}) if lane.failed else ("rows", lane.row)
            found[lane.contender][kind].append(head | more)
    return found
