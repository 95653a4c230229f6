"""Tokens per second of a real model on a long context, beside transformers' own caches.

    python benchmarks/generate.py [--tokens 6000] [--rounds 15] [--threads 1 2] [--model smollm2]
                                  [--only NAME …] [--out DIR]

The text goes through the model once, in chunks, into transformers' `DynamicCache`. Every cache then
gets these keys and values in a process of its own that holds a model and nothing else, and all
processes take turns, a token each; medians, quartiles and ratios in this run are written to
DIR/generate.json and generate.md. *Cache* is the sum of its tensors' bytes; what a process takes
is measured by `process.py`.

`QuantizedCache` (4 bits) needs optimum-quanto: `make bench-quanto`. It quantises its window of 128
tokens with all the rest again every 128th step; no measured step does.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import tempfile
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import runner
import torch
from leaderboard_bytes import held_bytes

from kvpact.spec import DEFAULT_SPEC

FOUR, EXACT, QUANTO = "turboquant:bits=4", "DynamicCache", "QuantizedCache"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPECS = (EXACT, FOUR, DEFAULT_SPEC, "turboquant:bits=3", "int:bits=8", QUANTO)
BOTH = (EXACT, FOUR, QUANTO)
CANDIDATES = {
    f"{spec}, {dtype}": (spec, dtype)
    for spec in SPECS
    for dtype in (DTYPES if spec in BOTH else ("fp32",))
}
TOKEN, CHUNK = torch.tensor([[5]]), 512
SPAWN = multiprocessing.get_context("spawn")


def prefill(model_name: str, tokens: int, path: Path, threads: int) -> None:
    """Write the keys and values of a text's first tokens, fp32, to a file."""
    from safetensors.torch import save_file
    from transformers import DynamicCache

    torch.set_num_threads(threads)
    model, ids = runner.book(model_name, tokens)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split(CHUNK, 1):
            runner.forward(model, part, cache)
    held = {"k": [x.keys for x in cache.layers], "v": [x.values for x in cache.layers]}
    save_file({f"{s}{i}": x.contiguous() for s, xs in held.items() for i, x in enumerate(xs)}, path)


def made(spec: str, model: Any) -> Any:
    """Return an empty cache of kvpact's, or of a class of transformers."""
    from transformers import DynamicCache, QuantizedCache

    from kvpact.integrations.transformers import CompressedCache

    if spec == EXACT:
        return DynamicCache(config=model.config)
    if spec == QUANTO:
        return QuantizedCache("quanto", model.config, nbits=4)
    return CompressedCache(model.config, spec)


def serve(pipe: Connection, model_name: str, spec: str, kind: str, path: Path) -> None:
    """Fill a cache, tell its bytes, then set threads, or carry out a step, as is asked."""
    from safetensors import safe_open

    from kvpact.integrations.models import load_model
    from kvpact.integrations.transformers import CompressedCache

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, _ = load_model(model_name, dtype=DTYPES[kind])
    warm, cache = made(spec, model), made(spec, model)
    for _ in range(3):  # libraries make room for themselves, and quanto compiles
        runner.forward(model, TOKEN, warm)
    del warm
    with safe_open(path, framework="pt") as file:
        for index in range(len(file.keys()) // 2):
            pair = (file.get_tensor(f"{s}{index}").to(DTYPES[kind], copy=True) for s in "kv")
            cache.update(*pair, index)
            if isinstance(cache, CompressedCache):
                cache.memory_usage()  # stores what waits for its first use
    kvpacts = isinstance(cache, CompressedCache)
    pipe.send(cache.memory_usage() if kvpacts else held_bytes(cache))
    turn = runner.turn_of(partial(runner.forward, model, TOKEN, cache))
    while True:
        try:
            threads = pipe.recv()
        except EOFError:
            return
        if threads:
            torch.set_num_threads(threads)
        else:
            pipe.send(turn())


class Process:
    """A cache in a process of its own; `cache` are its bytes."""

    def __init__(self, *work: Any) -> None:
        self.pipe, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(there, *work))
        self._process.start()
        there.close()
        try:
            self.cache = self.pipe.recv()
        except EOFError:
            raise SystemExit(f"{work[1]}, {work[2]}: its process ended, see above") from None

    def step(self) -> float:
        """Return the seconds of a step."""
        self.pipe.send(0)
        return self.pipe.recv()

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join()


def rows_of(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[runner.Row]:
    """Return a row per thread count and candidate."""
    path, processes, names = folder / "exact.safetensors", {}, options.only
    if not (importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto")):
        print("QuantizedCache is left out: optimum-quanto is not installed (make bench-quanto)")
        names = [name for name in names if not name.startswith(QUANTO)]
    what = (options.model, options.tokens, path, max(options.threads))
    exact = SPAWN.Process(target=prefill, args=what)
    exact.start()
    exact.join()
    if exact.exitcode:
        raise SystemExit("the exact keys and values could not be computed")
    for name in names:
        processes[name] = Process(options.model, *CANDIDATES[name], path)
        stack.callback(processes[name].close)
    rows = []
    for threads in options.threads:
        for process in processes.values():
            process.pipe.send(threads)
        turns = {name: process.step for name, process in processes.items()}
        for name, found in runner.in_turns(turns, options.rounds).items():
            low, middle, high = runner.quartiles(found, 1e3)
            row = {"threads": threads, "candidate": name, "ms": middle, "ms_quartiles": [low, high]}
            rows.append(row | {"cache": processes[name].cache})
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
                    holds = "yes" if ratio >= target else "no"
                    says.append(f"{ratio:.2f} x {other['candidate']} (at least {target}: {holds})")
            if exact := part.get(f"{EXACT}, fp32"):
                share = part[name]["cache"] / exact["cache"]
                holds = "yes" if share <= 0.15 else "no"
                says.append(f"{share:.3f} of fp32's cache bytes (at most .15: {holds})")
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
    """Measure, print, and write the report."""
    options = runner.arguments(
        __doc__, tokens=6000, rounds=15, threads=[1, 2], model="smollm2", only=CANDIDATES,
        out=runner.BENCH,
    )  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = rows_of(options, folder, stack)
    found, title = {"rows": rows, "lines": lines(rows)}, "A token of a real model on a long context"
    told = ("model", "tokens", "rounds")
    runner.report(options, "generate", found, tables(rows), told, title=title)


if __name__ == "__main__":
    main()
