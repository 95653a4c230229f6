"""Tokens per second of a real model on a long context, beside transformers' own caches.

    python benchmarks/generate.py [--tokens 6000] [--rounds 15] [--threads 1 2] [--model smollm2] …

The text goes through the model once, in chunks, into transformers' `DynamicCache`. Every cache then
gets these keys and values, and a model of the same weights with the attention that is made for it;
all take turns, a token each. Medians, quartiles and ratios in this run are written to
DIR/generate.json and generate.md. *MB* are those of all tensors that a cache holds; what a process
takes for it is measured by `process.py`.

`QuantizedCache` (4 bits) needs optimum-quanto: `make bench-quanto`. It quantises its window of 128
tokens with all the rest again every 128th step; no measured step does.
"""

import importlib.util
from functools import partial
from typing import Any

import runner
import torch
from leaderboard_bytes import held_bytes
from process import EXACT, made
from transformers import DynamicCache

from kvpact.integrations.transformers import CompressedCache
from kvpact.spec import DEFAULT_SPEC

FOUR, QUANTO = "turboquant:bits=4", "QuantizedCache"
QUANTO_PEER = "quanto: QuantizedCache, quanto, 4 bits"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPECS = (EXACT, FOUR, DEFAULT_SPEC, "turboquant:bits=3", "int:bits=8", QUANTO)
CANDIDATES = {
    f"{spec}, {dtype}": (spec, dtype)
    for spec in SPECS
    for dtype in (DTYPES if spec in (EXACT, FOUR, QUANTO) else ("fp32",))
}
HOLDS = {True: "yes", False: "no"}
TOKEN, CHUNK = torch.tensor([[5]]), 512


def filled(spec: str, model: Any, exact: DynamicCache) -> Any:
    """Return a cache that holds the keys and values of an exact one."""
    name = QUANTO_PEER if spec == QUANTO else spec
    warm, cache = made(name, model), made(name, model)
    for _ in range(3):  # libraries make room for themselves, and quanto compiles
        runner.forward(model, TOKEN, warm)
    for index, layer in enumerate(exact.layers):
        cache.update(*(x.to(model.dtype, copy=True) for x in (layer.keys, layer.values)), index)
        if isinstance(cache, CompressedCache):
            cache.memory_usage()  # stores what waits for its first use
    return cache


def rows_of(options: runner.Options) -> list[runner.Row]:
    """Return a row per thread count and candidate."""
    names, models, sizes, turns, rows = options.only, {}, {}, {}, []
    if not (importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto")):
        print("QuantizedCache is left out: optimum-quanto is not installed (make bench-quanto)")
        names = [name for name in names if not name.startswith(QUANTO)]
    for dtype, kind in DTYPES.items():
        models[dtype], ids = runner.book(options.model, options.tokens, dtype=kind)
    torch.set_num_threads(max(options.threads))
    exact = DynamicCache(config=models["fp32"].config)
    for part in ids.split(CHUNK, 1):
        runner.forward(models["fp32"], part, exact)
    for name in names:
        spec, dtype = CANDIDATES[name]
        model = runner.twin(models[dtype])  # a compressed cache sets its model's attention
        cache = filled(spec, model, exact)
        ours = isinstance(cache, CompressedCache)
        sizes[name] = cache.memory_usage() if ours else held_bytes(cache)
        turns[name] = runner.turn_of(partial(runner.forward, model, TOKEN, cache))
    for threads in runner.each_threads(options):
        for name, found in runner.in_turns(turns, options.rounds).items():
            low, middle, high = runner.quartiles(found, 1e3)
            row = {"threads": threads, "candidate": name, "ms": middle, "ms_quartiles": [low, high]}
            rows.append(row | {"cache": sizes[name]})
    return rows


def lines(rows: list[runner.Row]) -> list[str]:
    """Return a sentence per thread count and candidate of 4 bits, with the targets."""
    found = []
    for threads in dict.fromkeys(row["threads"] for row in rows):
        part = {row["candidate"]: row for row in rows if row["threads"] == threads}
        for name in (x for x in part if x.startswith(FOUR)):
            says = [f"{threads} thread(s), {name}"]
            for start, target in ((EXACT, 1), (QUANTO, 2)):
                others = [row for other, row in part.items() if other.startswith(start)]
                if other := min(others, key=lambda row: row["ms"], default=None):
                    ratio = other["ms"] / part[name]["ms"]
                    holds = HOLDS[ratio >= target]
                    says.append(f"{ratio:.2f} x {other['candidate']} (at least {target}: {holds})")
            if exact := part.get(f"{EXACT}, fp32"):
                share = part[name]["cache"] / exact["cache"]
                says.append(
                    f"{share:.3f} of fp32's cache bytes (at most .15: {HOLDS[share <= 0.15]})"
                )
            found.append("; ".join(says))
    return found


def tables(rows: list[runner.Row]) -> list[str]:
    """Return a table per thread count, and the lines."""
    body = []
    for threads in dict.fromkeys(row["threads"] for row in rows):
        part = [row for row in rows if row["threads"] == threads]
        first, cells = part[0], []
        for r in part:
            share = r["cache"] / first["cache"]
            numbers = (1e3 / r["ms"], first["ms"] / r["ms"], r["cache"] / 1e6, share)
            ms = runner.spread(r["ms_quartiles"], ".1f", r["ms"])
            forms = (".1f", ".2f", ".1f", ".3f")
            cells.append([r["candidate"], ms, *map(format, numbers, forms)])
        name = first["candidate"]
        columns = f"cache, model's dtype | ms a token | tokens/s | times {name} | MB | of {name}"
        body += [f"## {threads} thread(s)", "", runner.table(columns, cells), ""]
    return [*body, "## Targets", "", *(f"- {line}" for line in lines(rows))]


def main() -> None:
    options = runner.arguments(
        __doc__, tokens=6000, rounds=15, threads=[1, 2], model="smollm2", only=CANDIDATES,
        out=runner.BENCH,
    )  # fmt: skip
    with torch.no_grad():
        rows = rows_of(options)
    found, title = {"rows": rows, "lines": lines(rows)}, "A token of a real model on a long context"
    told = ("model", "tokens", "rounds")
    runner.report(options, "generate", found, tables(rows), told, title=title)


if __name__ == "__main__":
    main()
