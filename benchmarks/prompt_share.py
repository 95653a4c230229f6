"""How much of a prompt's time goes into storing its keys and values.

    python benchmarks/prompt_share.py [--model smollm2] [--spec trellis:bits=4 …] [--tokens 2048]
        [--threads 1 2] [--rounds 7] [--out DIR]

The beginning of a book is given to the model in one call, logits of the last token only, with a
CompressedCache. Storing is all that the layers do to keep the tokens: what codecs learn from them,
checks, encoding, copies of exact tokens. Specs take turns in each round. Printed are medians in
milliseconds, and of each round's two times the share: its median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from attend_rounds import quartiles
from machine import about, head

from kvpact.cache.layer import CacheLayer
from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache

Row = dict[str, Any]
STORING = ("prepare", "write")  # calls of a layer


@contextmanager
def storing() -> Iterator[list[float]]:
    """Collect the seconds of each call that stores tokens."""
    seconds: list[float] = []

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        @wraps(call)
        def watched(*args: object, **options: object) -> object:
            begin = perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds.append(perf_counter() - begin)

        return watched

    real = {name: getattr(CacheLayer, name) for name in STORING}
    for name, call in real.items():
        setattr(CacheLayer, name, timed(call))
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
        times: dict[str, list[tuple[float, float]]] = {spec: [] for spec in options.spec}
        for turn in range(options.rounds + 1):
            for spec, found in times.items():
                cache = CompressedCache(model.config, spec)
                with storing() as seconds:
                    begin = perf_counter()
                    model(ids, past_key_values=cache, logits_to_keep=1)
                    whole = perf_counter() - begin
                if turn:  # the first round warms up
                    found.append((whole, sum(seconds)))
        for spec, found in times.items():
            low, middle, high = quartiles([part / whole for whole, part in found])
            whole, part = (statistics.median(kind) * 1e3 for kind in zip(*found, strict=True))
            where = {"spec": spec, "tokens": ids.shape[1], "threads": threads}
            share = {"share": middle, "quartiles": [low, high]}
            rows.append(where | {"prompt_ms": whole, "storing_ms": part} | share)
    return rows


def markdown(rows: list[Row], found: dict[str, object]) -> str:
    """Return a table."""
    lines = [head(found), "", "| spec | tokens | threads | prompt, ms | storing, ms | share |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for r in rows:
        low, high = r["quartiles"]
        share = f"{r['share']:.2%} ({low:.2%} to {high:.2%})"
        numbers = f"{r['prompt_ms']:.0f} | {r['storing_ms']:.1f} | {share}"
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
        options.out.mkdir(parents=True, exist_ok=True)
        data = json.dumps({"about": found, "rows": rows}, indent=1)
        (options.out / "prompt_share.json").write_text(data + "\n", "utf-8")
        (options.out / "prompt_share.md").write_text(report, "utf-8")


if __name__ == "__main__":
    main()
