"""Attention over caches of 8 and 4 bits: kvpact beside ONNX Runtime, llama.cpp, OpenVINO and torch.

    python benchmarks/anchors.py [--shapes A B C] [--tokens 2048 8192 32768] [--queries 1 256] …

One layer, random K, V and queries in fp32, which follow --tokens held ones. Each peer quantises K
and V in its own way and attends by its own kernel. All take turns in each round; each has a ring of
caches of at least --ring megabytes, so that nothing comes from the processor's caches. Who has had
--seconds in a cell waits for the next cell: of a call that takes longer only the first one counts.
What would take more than --longest seconds a call, by its time with fewer tokens, is left out.
Errors are norms of the difference to fp64 over the norm, of 8 queries. Peers are installed into
build/peers/anchors, where ggml is compiled. Medians go to DIR/anchors.md, quartiles to
DIR/anchors.json.
"""

import gc
import itertools
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import runner
import torch
from anchors_kept import Maker, Ring, case_of
from leaderboard_contenders import installed
from runner import Row
from torch import Tensor

SHAPES = {"A": (8, 4, 128), "B": (8, 8, 64), "C": (3, 3, 64)}
"""KV heads, query heads per KV head, width."""
REQUIRES = (
    "onnxruntime==1.32.0", "onnx==1.23.2", "ml_dtypes", "flatbuffers", "protobuf",
    "ggml-python==0.0.45", "openvino==2026.4.1",
)  # fmt: skip
PEERS = dict(kept="kvpact", onnxruntime="onnxruntime", ggml="ggml-python", openvino="openvino")
CLASSES = (
    ("int:bits=8", "ONNX Runtime int8", "llama.cpp q8_0", "OpenVINO u8"),
    (
        "int:bits=4", "turboquant:bits=4", "trellis:bits=4",
        "ONNX Runtime int4", "llama.cpp q4_0", "OpenVINO u4",
    ),
    ("torch fp32", "torch bf16", "ONNX Runtime fp32", "llama.cpp f16"),
)  # fmt: skip
"""Of 8 bits, of 4 bits, and exact ones."""
RESULTS = Path(__file__).parent / "results" / "anchors"


def in_turns(
    rings: dict[str, Ring], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Return the seconds of calls, the first of each left out if there are others, and outputs."""
    times: dict[str, list[float]] = {name: [] for name in rings}
    outputs: dict[str, Tensor] = {}
    for turn in range(rounds + 1):
        for name, ring in rings.items():
            if sum(times[name]) < seconds:
                again = min(12, len(ring), int(1e-2 / times[name][0])) if turn else 1
                begun = time.perf_counter()
                for index in range(max(1, again)):
                    outputs[name] = ring[(turn + index) % len(ring)]()
                times[name].append((time.perf_counter() - begun) / max(1, again))
    return {name: found[1:] or found for name, found in times.items()}, outputs


def cells(
    options: runner.Options, shape: str, tokens: int, queries: int, before: list[Row]
) -> list[Row]:
    """Measure all candidates of a shape, a past and queries, at every number of threads."""
    torch.set_num_threads(max(options.threads))
    case = case_of(*SHAPES[shape], tokens, queries, options.ring)
    makers: dict[str, Maker] = {}
    for peer in options.peers:
        makers |= import_module(f"anchors_{peer}").makers(case)
    rows: list[Row] = []
    errors: dict[str, float] = {}
    for threads in runner.each_threads(options):
        place = {"shape": shape, "tokens": tokens, "queries": queries, "threads": threads}
        rings = {
            name: made(threads)
            for name, made in makers.items()
            if expected({**place, "what": name}, before) < options.longest
        }
        times, outputs = in_turns(rings, options.rounds, options.seconds)
        errors |= {name: case.error(x) for name, x in outputs.items() if name not in errors}
        for name, found in times.items():
            low, middle, high = runner.quartiles(found, 1e3)
            told = {"ms": middle, "low": low, "high": high, "calls": len(found)}
            rows.append({**place, "what": name, **told, "error": errors[name]})
    return rows


def expected(row: Row, before: list[Row]) -> float:
    """Return the seconds that a call will take if they grow with the tokens; 0 if not known."""
    same = ("shape", "queries", "threads", "what")
    for r in before[::-1]:
        if all(r[name] == row[name] for name in same):
            return r["ms"] / 1e3 * (row["tokens"] + row["queries"]) / (r["tokens"] + r["queries"])
    return 0.0


def tables(rows: list[Row]) -> list[str]:
    """Return a row per work and a column per candidate; the quickest ones are bold."""
    names = [n for of in CLASSES for n in of if any(r["what"] == n for r in rows)]
    lines = []
    for queries in dict.fromkeys(r["queries"] for r in rows):
        some = [r for r in rows if r["queries"] == queries]
        keys = sorted({(r["shape"], r["tokens"], r["threads"]) for r in some})
        at = {(r["shape"], r["tokens"], r["threads"], r["what"]): r for r in some}
        lines += [f"Milliseconds of {queries} {'query' if queries == 1 else 'queries'}:", ""]
        cells = []
        for key in keys:
            ms = {n: at[*key, n]["ms"] for n in names if (*key, n) in at}
            best = [min((n for n in of if n in ms), key=ms.get, default="") for of in CLASSES]
            told = [number(ms[n]) if n in ms else "–" for n in names]
            told = [f"**{x}**" if n in best else x for n, x in zip(names, told, strict=True)]
            cells.append([f"{said(key[0])}, {key[1]:,}, {key[2]}", *told])
        errors = {n: max(r["error"] for r in some if r["what"] == n) for n in names}
        cells.append(["largest error", *(f"{errors[n]:.1e}" for n in names)])
        columns = ["heads, tokens, threads", *(f"`{n}`" for n in names)]
        lines += [runner.table(columns, cells), ""]
    behind = [text for of in CLASSES[:2] for text in ahead(rows, of)]
    return [*lines, "Ahead of kvpact at as many bits: " + ("; ".join(behind) or "nobody") + "."]


def ahead(rows: list[Row], of: tuple[str, ...]) -> list[str]:
    """Return each work in which somebody else is quicker than all specs of a class."""
    works: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        if r["what"] in of:
            key = r["shape"], r["tokens"], r["threads"], r["queries"]
            works.setdefault(key, {})[r["what"]] = r["ms"]
    found = []
    for (shape, tokens, threads, queries), ms in works.items():
        ours = min((ms[n] for n in ms if ":" in n), default=0.0)
        place = f"{said(shape)}, {tokens:,} tokens, {threads} threads, {queries} queries"
        quicker = [n for n in ms if ":" not in n and ms[n] < ours]
        found += [f"`{n}` by {ours / ms[n]:.2f} times ({place})" for n in quicker]
    return found


def number(ms: float) -> str:
    """Return three digits, or what stands before the point."""
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}"


def said(shape: str) -> str:
    """Return query heads, KV heads and width of a shape."""
    heads, groups, dim = SHAPES[shape]
    return f"{heads * groups}/{heads} x {dim}"


def main() -> None:
    options = runner.arguments(
        __doc__, shapes=SHAPES, tokens=[2048, 8192, 32768], queries=[1, 256], threads=[1, 2],
        peers=PEERS, rounds=15, seconds=0.4, longest=5.0, ring=96, out=RESULTS,
    )  # fmt: skip
    if options.peers != ["kept"]:
        sys.path.append(str(installed("anchors", REQUIRES)))
    told = {PEERS[name]: version(PEERS[name]) for name in options.peers}
    told |= {"level": runner.native_level(), "title": "Attention over caches of 8 and 4 bits"}
    rows: list[Row] = []
    works = [*itertools.product(options.queries, options.shapes, options.tokens)]
    for number, (queries, shape, tokens) in enumerate(works, 1):
        rows += cells(options, shape, tokens, queries, rows)
        gc.collect()
        told["last"] = number == len(works)
        runner.report(options, "anchors", rows, tables(rows), **told)


if __name__ == "__main__":
    main()
