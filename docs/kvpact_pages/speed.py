"""What ``speed.md`` takes from committed measurements."""

from __future__ import annotations

from typing import Any

from kvpact_pages.chart import draw
from kvpact_pages.results import FOLDER, MODELS, code, load, table

CONTEXTS = (1024, 4096, 16384, 65536)
SHAPES = {
    "A": "A: 32 query heads over 8 KV heads of width 128",
    "B": "B: 9 query heads over 3 KV heads of width 64, those of SmolLM2-135M",
}
DRAWN = ("fp16, fused", "8 bits", "4 bits", "2 bits", "trellis 4")


def machine(name: str) -> str:
    """Return on what a file was measured, in a line."""
    about = load(name)["about"]
    found = [f"{key}: {value}" for key, value in about.items() if key not in ("tokens", "rounds")]
    return "Measured on: " + ", ".join(found) + "."


def summary() -> str:
    """Return what the page shows, in a few sentences."""
    rows = [r for r in load("generate/generate.json")["rows"] if r["threads"] == 1]
    ms = {r["candidate"]: r["ms"] for r in rows}
    own = ms["turboquant:bits=4, fp32"]
    found = _attention()
    times = [
        found[shape, 1, 16384, name]["times_best_torch"]
        for shape in SHAPES
        for name in ("8 bits", "4 bits", "2 bits", "trellis 4")
    ]
    return (
        "After 6,000 tokens of context SmolLM2-135M generates "
        f"{ms['DynamicCache, fp32'] / own:.2f} times as fast on `turboquant:bits=4` as on "
        "transformers' `DynamicCache` in fp32, on one thread of a server's CPU, and "
        f"{ms['QuantizedCache, fp32'] / own:.1f} times as fast as on its `QuantizedCache` of 4 "
        "bits (quanto). With AVX-512 one step of attention over 16,384 tokens is "
        f"{min(times):.1f} to {max(times):.1f} times as fast as the fastest way that torch has, "
        "depending on bits and shape. Below a few hundred tokens there is little to "
        "gain. **Every figure here is from a CPU**; the kernels for GPUs have not been timed."
    )


def anchors() -> str:
    """Return the tables of attention beside other engines, without their title."""
    return (FOLDER / "anchors" / "anchors.md").read_text("utf-8").partition("\n\n")[2].strip()


def generate() -> str:
    """Return the table of SmolLM2 generating after 6,000 tokens."""
    data = load("generate/generate.json")
    rows, cells = data["rows"], []
    base = {r["threads"]: r for r in rows if r["candidate"] == "DynamicCache, fp32"}
    for row in rows:
        exact = base[row["threads"]]
        cells.append(
            [
                _candidate(row["candidate"]),
                str(row["threads"]),
                f"{row['ms']:.0f}",
                f"{exact['ms'] / row['ms']:.2f}x",
                f"{row['cache'] / 1e6:.0f}",
                f"{row['cache'] / exact['cache']:.3f}",
            ]
        )
    columns = ("cache", "threads", "ms a token", "against fp32", "MB", "of fp32's")
    return table(columns, cells) + "\n\n" + machine("generate/generate.json")


def _candidate(name: str) -> str:
    cache, _, rest = name.partition(", ")
    if cache == "QuantizedCache":
        return f"`QuantizedCache` (quanto, 4 bits), {rest}"
    return f"{code(cache)}, {rest}"


def latency() -> str:
    """Return the table of first tokens and short steps on both models."""
    names = {MODELS[name]: f"latency/{name}/latency.json" for name in ("smollm2", "gemma3")}
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for name, path in names.items():
        for row in load(path)["rows"]:
            column = found.setdefault((name, str(row["threads"])), {})
            column[row["what"], row["tokens"]] = f"{row['ratio']:.2f}"
    cells = []
    for what, said in (("prompt", "first token of {} tokens"), ("step", "a step after {}")):
        for tokens in sorted(
            {n for column in found.values() for kind, n in column if kind == what}
        ):
            same = [column.get((what, tokens), "-") for column in found.values()]
            cells.append([said.format(f"{tokens:,}"), *same])
    columns = [f"{name}, threads: {threads}" for name, threads in found]
    head = table(["time over that of `DynamicCache`", *columns], cells)
    return "\n\n".join([head, *map(machine, names.values())])


MIB = 1 << 20
PROCESS = "memory/process.json"


def process() -> str:
    """Return the tables of what a process takes for a cache, of each model and dtype."""
    parts = []
    for model, dtype in dict.fromkeys((r["model"], r["dtype"]) for r in load(PROCESS)["rows"]):
        cells = [
            [
                f"{r['tokens']:,}" + (f" in chunks of {r['chunk']}" if r["chunk"] else ""),
                str(r["threads"]),
                code(r["spec"]),
                *(f"{r[size] / MIB:.0f}" for size in ("cache", "peak", "after")),
            ]
            for r in load(PROCESS)["rows"]
            if (r["model"], r["dtype"]) == (model, dtype)
        ]
        columns = ("prompt", "threads", "cache", "holds, MiB", "peak", "after")
        parts += [f"{MODELS[model]}, {dtype}:", table(columns, cells, left=1)]
    return "\n\n".join([*parts, machine(PROCESS)])


def long_lived() -> str:
    """Return the table of processes in which caches come, go, grow and are saved."""
    name = "memory/long_lived.json"
    cells = []
    for row in load(name)["rows"]:
        sizes = {x: y for x, y in row.items() if x not in ("scenario", "what", "cache")}
        held = f"{row['cache']:.0f}" if row["cache"] else "-"
        said = (f"{x} {y:.1f}" if "copies" in x else f"{x} {y:.0f}" for x, y in sizes.items())
        cells.append([row["what"].rstrip("."), held, ", ".join(said)])
    columns = ("scenario", "the cache holds, MiB", "the process, MiB or copies of the cache")
    return table(columns, cells, left=3) + "\n\n" + machine(name)


def _attention() -> dict[tuple[str, int, int, str], dict[str, Any]]:
    rows = load("attend/attend.json")["rows"]
    return {(r["shape"], r["threads"], r["tokens"], r["candidate"]): r for r in rows}


NAMES = (
    "8 bits", "4 bits", "3 bits", "2 bits", "trellis 4", "kivi 4", "kvarn 4",
    "centred 4", "4 bits, paged", "fp16, fused",
)  # fmt: skip


def attention() -> str:
    """Return how much faster one step of attention is than torch's fastest."""
    found, parts = _attention(), []
    for shape, said in SHAPES.items():
        rows = [
            [name, *(f"{found[shape, 1, n, name]['times_best_torch']:.2f}x" for n in CONTEXTS)]
            for name in NAMES
        ]
        parts += [f"{said}; one thread:", table(["", *(f"{n:,}" for n in CONTEXTS)], rows)]
    return "\n\n".join([*parts, machine("attend/attend.json")])


def attention_chart(shape: str) -> str:
    """Draw ms of a step of attention over the context."""
    found = _attention()
    contexts = sorted({key[2] for key in found})
    best = [(t, found[shape, 1, t, "4 bits"]) for t in contexts]
    lines = {
        "torch, the fastest of 8 ways": [(t, r["ms"] * r["times_best_torch"]) for t, r in best]
    }
    for name in DRAWN:
        lines[f"kvpact, {name}"] = [(t, found[shape, 1, t, name]["ms"]) for t in contexts]
    marks = {t: f"{t // 1024}k" if t >= 1024 else str(t) for t in contexts}
    title = f"One step of attention, shape {shape}, one thread"
    names = ("tokens of context", "ms, less is better")
    return draw(title, lines, marks, *names, xscale="log")


def pictures() -> dict[str, str]:
    """Return the pictures of the page by file name."""
    return {f"speed-attention-{shape.lower()}.svg": attention_chart(shape) for shape in SHAPES}


BLOCKS = {
    "speed-anchors": anchors,
    "speed-summary": summary,
    "speed-generate": generate,
    "speed-latency": latency,
    "speed-attention": attention,
    "speed-process": process,
    "speed-long-lived": long_lived,
}
