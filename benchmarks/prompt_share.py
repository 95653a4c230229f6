"""Shares of a prompt's time that encoding and storing its keys and values take.

    python benchmarks/prompt_share.py [--model smollm2] [--spec trellis:bits=4 …] [--tokens 2048]
        [--threads 1 2] [--rounds 7] [--out DIR]

The beginning of a book is given to the model in one call, logits of the last token only, with a
CompressedCache. Encoding is what turns tokens into slots. Storing is all that the layers do to
keep them: encoding, what codecs learn from the first tokens, checks, memory, copies of exact
tokens. Specs take turns in each round. Printed are medians in milliseconds, and of each round's
times the shares: median and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from attend_rounds import quartiles
from machine import about, head, save

from kvpact.cache.layer import CacheLayer
from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

Row = dict[str, Any]
STORING = ("prepare", "write")  # calls of a layer; the second one encodes


@contextmanager
def storing() -> Iterator[dict[str, float]]:
    """Add up the seconds of the calls that store tokens, by name."""
    seconds = dict.fromkeys(STORING, 0.0)

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        @wraps(call)
        def watched(*args: object, **options: object) -> object:
            begin = perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds[name] += perf_counter() - begin

        return watched

    real = {name: getattr(CacheLayer, name) for name in STORING}
    for name, call in real.items():
        setattr(CacheLayer, name, timed(name, call))
    try:
        yield seconds
    finally:
        for name, call in real.items():
            setattr(CacheLayer, name, call)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure all specs for every number of threads."""
    model, tokenizer = load_model(options.model)
    text = book_path().read_text("utf-8")[: 8 * options.tokens]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : options.tokens]
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        times: dict[str, list[tuple[float, ...]]] = {spec: [] for spec in options.spec}
        for turn in range(options.rounds + 1):
            for spec, found in times.items():
                cache = CompressedCache(model.config, spec)
                with storing() as seconds:
                    begin = perf_counter()
                    model(ids, **named(cache), logits_to_keep=1)
                    whole = perf_counter() - begin
                if turn:  # the first round warms up
                    found.append((whole, seconds["write"], sum(seconds.values())))
        for spec, found in times.items():
            row: Row = {"spec": spec, "tokens": ids.shape[1], "threads": threads}
            medians = (statistics.median(kind) * 1e3 for kind in zip(*found, strict=True))
            names = ("prompt_ms", "encoding_ms", "storing_ms")
            row |= dict(zip(names, medians, strict=True))
            for place, name in enumerate(("encoding", "storing"), 1):
                row[name] = quartiles([kind[place] / kind[0] for kind in found])
            rows.append(row)
    return rows


def markdown(rows: list[Row], found: dict[str, object]) -> str:
    """Return a table."""
    names = "spec | tokens | threads | prompt, ms | encoding, ms | share | storing, ms | share"
    lines = [head(found), "", f"| {names} |", "|---" + "|--:" * 7 + "|"]
    for r in rows:
        numbers = f"{r['prompt_ms']:.0f}"
        for name in ("encoding", "storing"):
            low, middle, high = r[name]
            numbers += f" | {r[name + '_ms']:.1f} | {middle:.1%} ({low:.1%} to {high:.1%})"
        lines.append(f"| `{r['spec']}` | {r['tokens']} | {r['threads']} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write DIR/prompt_share.json and DIR/prompt_share.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--spec", nargs="+", default=["trellis:bits=4", "turboquant:bits=4"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = about(model=options.model)
    with torch.no_grad():
        rows = measure(options)
    report = markdown(rows, found)
    print(report)
    if options.out:
        save(options.out, "prompt_share", found, rows, report)


if __name__ == "__main__":
    main()
