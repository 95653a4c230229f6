"""Time to the first token of a prompt, and of a decode step, beside transformers' DynamicCache.

    python benchmarks/latency.py [--model smollm2] [--spec trellis:bits=4] [--threads 1 2]
        [--prompts 16 32 … 4096] [--held 16 32 64 128 256 1024] [--rounds 5]
        [--steps 40] [--out DIR]

Each cache has a model with the attention that is made for it, ``sdpa`` for DynamicCache, ``kvpact``
for the compressed one; both models have the same weights in memory, since where weights lie makes
them 5 % quicker or slower. The two take turns. A prompt is the
beginning of a book, given in one call, logits of the last token only; a step is one token after so
many. Printed are medians in milliseconds, and the ratio of each round's two times: its median and
quartiles. Below 1 the compressed cache is the quicker one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from attend_rounds import quartiles
from machine import about, head, save
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

Row = dict[str, Any]
Make = Callable[[], Cache]


def timed(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache) -> float:
    """Carry out one forward pass; return seconds."""
    begin = perf_counter()
    model(tokens, **named(cache), logits_to_keep=1)
    return perf_counter() - begin


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model with the same weights in the same memory."""
    with torch.device("meta"):
        other: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    for name, buffer in model.named_buffers():
        other.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    return other.eval()


def row(name: str, tokens: int, threads: int, times: list[tuple[float, float]]) -> Row:
    """Return medians in milliseconds and the ratio of ours over theirs, round by round."""
    low, middle, high = quartiles([ours / theirs for theirs, ours in times])
    theirs, ours = (statistics.median(found) * 1e3 for found in zip(*times, strict=True))
    ratio = {"ratio": middle, "quartiles": [low, high]}
    return {"what": name, "tokens": tokens, "threads": threads, "ms": [theirs, ours], **ratio}


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure prompts and steps for every number of threads."""
    theirs, tokenizer = load_model(options.model)
    ours = twin(theirs)
    text = book_path().read_text("utf-8")[: 8 * max([*options.prompts, *options.held])]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    makes: list[tuple[PreTrainedModel, Make]] = [
        (theirs, lambda: DynamicCache(config=theirs.config)),
        (ours, lambda: CompressedCache(ours.config, options.spec)),
    ]
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for count in options.prompts:
            prompt, times = ids[:, :count], []
            # Short prompts take more rounds: their times spread more.
            for turn in range(max(options.rounds, 4096 // count // 8) + 1):
                found = [0.0, 0.0]
                for side in (turn % 2, 1 - turn % 2):
                    model, make = makes[side]
                    found[side] = timed(model, prompt, make())
                if turn:  # the first round warms up
                    times.append((found[0], found[1]))
            rows.append(row("prompt", count, threads, times))
        for count in options.held:
            caches = [make() for _, make in makes]
            for (model, _), cache in zip(makes, caches, strict=True):
                timed(model, ids[:, :count], cache)
            token, times = ids[:, count : count + 1], []
            for turn in range(options.steps + 3):
                found = [0.0, 0.0]
                for side in (turn % 2, 1 - turn % 2):
                    found[side] = timed(makes[side][0], token, caches[side])
                if turn >= 3:
                    times.append((found[0], found[1]))
            rows.append(row("step", count, threads, times))
    return rows


def markdown(rows: list[Row], found: dict[str, object]) -> str:
    """Return a table."""
    lines = [head(found), "", "| | tokens | threads | DynamicCache, ms | kvpact, ms | ratio |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for r in rows:
        low, high = r["quartiles"]
        numbers = (
            f"{r['ms'][0]:.1f} | {r['ms'][1]:.1f} | {r['ratio']:.3f} ({low:.3f} to {high:.3f})"
        )
        lines.append(f"| {r['what']} | {r['tokens']} | {r['threads']} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write DIR/latency.json and DIR/latency.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--spec", default="trellis:bits=4")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--held", type=int, nargs="*", default=[16, 32, 64, 128, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = about(model=options.model, spec=options.spec)
    with torch.no_grad():
        rows = measure(options)
    report = markdown(rows, found)
    print(report)
    if options.out:
        save(options.out, "latency", found, rows, report)


if __name__ == "__main__":
    main()
