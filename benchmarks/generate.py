"""Tokens per second and memory of a real model on a long context, beside transformers' own caches.

    python benchmarks/generate.py [--tokens 6000] [--rounds 15] [--threads 1 2] [--model smollm2]
                                  [--only NAME …] [--out DIR]

The text goes through the model once, in chunks, into transformers' `DynamicCache`. Every cache then
gets these keys and values in a process of its own that holds a model and nothing else, and all
processes take turns, a token each; medians, quartiles and ratios in this run are written to
DIR/generate.json and generate.md.

Memory is the system's count. *Resident* is what the filled cache added to the process (nothing is
given back to the system before it is read); *peak* how much more was resident at any time of a
step: the peak (VmHWM) is set back right before it. *Cache* is the sum of the tensors' bytes.

`QuantizedCache` (4 bits) needs optimum-quanto: `make bench-quanto`. It quantises its window of 128
tokens with all the rest again every 128th step; no measured step does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import tempfile
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext
from pathlib import Path

# Before torch is there: idle threads of other processes must not spin.
from attend_rounds import quartiles
from generate_process import Candidate, prefill, serve
from generate_report import Row, lines, markdown
from machine import about

import kvpact
from kvpact.spec import DEFAULT_SPEC

TEXT = Path(kvpact.__file__).parent / "data" / "northanger_abbey.txt"
FOUR, QUANTO = "turboquant:bits=4", "QuantizedCache"
CANDIDATES = [
    Candidate("DynamicCache", "fp32"),
    Candidate("DynamicCache", "bf16"),
    *(Candidate(FOUR, dtype) for dtype in ("fp32", "bf16")),
    Candidate(DEFAULT_SPEC, "fp32"),
    Candidate("turboquant:bits=3", "fp32"),
    Candidate("int:bits=8", "fp32"),
    Candidate(QUANTO, "fp32"),
    Candidate(QUANTO, "bf16"),
]


def fresh() -> ForkServerContext:
    """Return what makes processes that have imported what they need and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvpact.integrations.transformers"])
    return context


class Process:
    """A cache in a process of its own."""

    def __init__(self, model: str, candidate: Candidate, path: Path) -> None:
        context = fresh()
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, model, candidate, path))
        self._process.start()
        there.close()
        try:
            self.sizes = self.pipe.recv()
        except EOFError:
            raise SystemExit(f"{candidate.name}: its process ended, see above") from None

    def ask(self, what: str) -> float:
        """Return what the process answers."""
        self.pipe.send(what)
        return self.pipe.recv()

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join()


def measured(processes: dict[str, Process], threads: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds a token of each cache, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in processes}
    for process in processes.values():
        process.pipe.send(threads)
    for index in range(rounds + 1):
        for name, process in processes.items():
            found = process.ask("step")
            if index:  # the first round warms up
                times[name].append(found)
    return times


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="smollm2")
    names = [candidate.name for candidate in CANDIDATES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    return parser.parse_args()


def wanted(names: list[str]) -> list[Candidate]:
    """Return the candidates of these names that can run here."""
    found = [candidate for candidate in CANDIDATES if candidate.name in names]
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        return found
    print("QuantizedCache is left out: optimum-quanto is not installed (make bench-quanto)")
    return [candidate for candidate in found if candidate.spec != QUANTO]


def exact(options: argparse.Namespace, path: Path) -> None:
    """Compute the keys and values of the text, in a process of its own."""
    text = TEXT.read_text("utf-8")[: 8 * options.tokens]
    what = (options.model, text, options.tokens, path, max(options.threads))
    process = fresh().Process(target=prefill, args=what)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the exact keys and values could not be computed")


def rows_of(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[Row]:
    """Return a row per thread count and candidate."""
    path, processes = folder / "exact.safetensors", {}
    print(f"computing {options.tokens} tokens …", flush=True)
    exact(options, path)
    for candidate in wanted(options.only):
        print(f"filling {candidate.name} …", flush=True)
        processes[candidate.name] = Process(options.model, candidate, path)
        stack.callback(processes[candidate.name].close)
    peaks = {name: process.ask("peak") for name, process in processes.items()}
    rows = []
    for threads in options.threads:
        for name, found in measured(processes, threads, options.rounds).items():
            low, middle, high = (value * 1e3 for value in quartiles(found))
            row = {"threads": threads, "candidate": name, "ms": middle, "ms_quartiles": [low, high]}
            rows.append(row | processes[name].sizes | {"peak": peaks[name]})
    return rows


def main() -> None:
    """Measure, print, and write the report."""
    options = arguments()
    head = about(model=options.model, tokens=options.tokens, rounds=options.rounds)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = rows_of(options, folder, stack)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "generate"
    written = {"about": head, "rows": rows, "lines": lines(rows, FOUR)}
    path.with_suffix(".json").write_text(json.dumps(written, indent=1))
    path.with_suffix(".md").write_text(markdown(rows, head, FOUR))
    print(markdown(rows, head, FOUR) + f"\nwritten to {path}.json and .md")


if __name__ == "__main__":
    main()
