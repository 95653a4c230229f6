"""Time of a DynamicCache before and after kvpact told malloc anything, in one process.

    python benchmarks/told.py [--model smollm2] [--tokens 512 2048] [--threads 2] [--rounds 7]

Medians in milliseconds of a prompt, and of a step behind it, and their ratios: above 1 the exact
cache is slower after a compressed one has stored a prompt of 4,000 tokens.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch
from machine import about, head
from transformers import DynamicCache, PreTrainedModel

from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

STEPS = 8


def timed(model: PreTrainedModel, ids: torch.Tensor, count: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and of a step."""
    cache, begin = DynamicCache(config=model.config), perf_counter()
    model(ids[:, :count], **named(cache), logits_to_keep=1)
    prompt, begin = perf_counter() - begin, perf_counter()
    for token in ids[:, count : count + STEPS].split(1, 1):
        model(token, **named(cache), logits_to_keep=1)
    return prompt, (perf_counter() - begin) / STEPS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model)
    text = book_path().read_text("utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    print(head(about(model=options.model, threads=options.threads, rounds=options.rounds)))
    found: dict[str, list[tuple[float, float]]] = {}
    with torch.no_grad():
        for told in (False, True):
            if told:
                other = CompressedCache(model)
                model(ids[:, :4000], **named(other), logits_to_keep=1)
                model(ids[:, 4000:4001], **named(other), logits_to_keep=1)
                model.set_attn_implementation("sdpa")
            for count in options.tokens:
                rounds = [timed(model, ids, count) for _ in range(options.rounds + 2)][2:]
                medians = [statistics.median(x) * 1e3 for x in zip(*rounds, strict=True)]
                found.setdefault(str(count), []).append((medians[0], medians[1]))
    print("| prompt | ms before | after | ratio | step, ms before | after | ratio |")
    print("|--:" * 7 + "|")
    for count, (before, after) in found.items():
        ratios = " | ".join(
            f"{x:.1f} | {y:.1f} | {y / x:.3f}" for x, y in zip(before, after, strict=True)
        )
        print(f"| {count} | {ratios} |")


if __name__ == "__main__":
    main()
