"""What ``speed.md`` takes from committed measurements."""

from __future__ import annotations

from typing import Any

from kvpact_pages.chart import Axis, Series, decades, draw
from kvpact_pages.results import MODELS, code, load, percent, table

CONTEXTS = (1024, 4096, 16384, 65536)
SHORT = (32, 64, 128, 256)
CAPPED = "times_best_torch_capped"
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
    rows = [{(r["what"], r["tokens"]): r for r in load(path)["rows"]} for path in names.values()]
    cells = []
    for what, said in (("prompt", "first token of {} tokens"), ("step", "a step after {}")):
        for tokens in sorted({n for kind, n in rows[0] if kind == what}):
            same = [f"{found[what, tokens]['ratio']:.2f}" for found in rows]
            cells.append([said.format(f"{tokens:,}"), *same])
    head = table(["time over that of `DynamicCache`", *names], cells)
    return "\n\n".join([head, *map(machine, names.values())])


def leaderboard() -> str:
    """Return the times of kvpact's caches on the leaderboard, both models."""
    rows = load("leaderboard/own.json")["rows"]
    contexts = [step["tokens"] for step in rows[0]["steps"]]
    prompt = load("leaderboard/own.json")["about"]["prompt"]
    cells = []
    for row in rows:
        times = [row["prompt"][1], *(step["ratio"][1] for step in row["steps"])]
        cells.append([MODELS[row["model"]], code(row["cache"]), *(f"{t:.2f}" for t in times)])
    columns = ["model", "cache", f"prompt of {prompt:,}", *(f"step after {n:,}" for n in contexts)]
    return table(columns, cells, left=2) + "\n\n" + machine("leaderboard/own.json")


def _attention() -> dict[tuple[str, int, int, str], dict[str, Any]]:
    rows = load("attend/attend.json")["rows"]
    return {(r["shape"], r["threads"], r["tokens"], r["candidate"]): r for r in rows}


def _times(contexts: tuple[int, ...], shape: str, key: str, names: tuple[str, ...]) -> str:
    found = _attention()
    cells = [
        [name, *(f"{found[shape, 1, tokens, name][key]:.2f}x" for tokens in contexts)]
        for name in names
    ]
    return table(["", *(f"{tokens:,}" for tokens in contexts)], cells)


NAMES = (
    "8 bits", "4 bits", "3 bits", "2 bits", "trellis 4", "kivi 4", "kvarn 4",
    "centred 4", "4 bits, paged", "fp16, fused",
)  # fmt: skip


def attention() -> str:
    """Return how much faster one step of attention is than torch's fastest."""
    parts = []
    for shape, said in SHAPES.items():
        parts += [f"{said}; one thread:", _times(CONTEXTS, shape, "times_best_torch", NAMES)]
    return "\n\n".join([*parts, machine("attend/attend.json")])


def without_bf16() -> str:
    """Return the same against torch without bf16 instructions."""
    return _times(CONTEXTS, "A", CAPPED, ("8 bits", "4 bits", "2 bits", "trellis 4"))


def short() -> str:
    """Return the same for short contexts."""
    names = ("4 bits", "8 bits", "2 bits")
    parts = []
    for shape in SHAPES:
        parts += [f"Shape {shape}:", _times(SHORT, shape, "times_best_torch", names)]
    return "\n\n".join(parts)


def linearity() -> str:
    """Return fixed time, time per token, and how far any context is from that line."""
    rows = [r for r in load("attend/linearity.json")["rows"] if r["threads"] == 1]
    cells = [
        [
            r["shape"],
            r["candidate"],
            f"{r['fixed_us']:.0f}",
            f"{r['ns_per_token']:.1f}",
            percent(100 * r["off_line"]),
        ]
        for r in rows
    ]
    columns = ("shape", "", "µs fixed", "ns a token", "furthest from the line")
    return table(columns, cells, left=2)


def prompts() -> str:
    """Return attention over prompts and chunks against torch's."""
    rows = [r for r in load("prompt/prompt.json")["rows"] if r["threads"] == 1]
    cells = [
        [
            r["shape"],
            f"{r['past']:,}",
            f"{r['new']:,}",
            f"{r['ms']['kvpact']:.0f}",
            f"{r['ms']['sdpa']:.0f}",
            f"{r['ratios']['sdpa']:.2f}x",
        ]
        for r in rows
    ]
    columns = ("shape", "tokens held", "new", "kvpact, ms", "torch, ms", "faster")
    return table(columns, cells) + "\n\n" + machine("prompt/prompt.json")


def encoding() -> str:
    """Return how fast tokens are packed, and unpacked, at a width of 128."""
    name = "attend/encode.json"
    data = load(name)
    decoded = {(r["spec"], r["side"]): r for r in data["decoded"] if r["dim"] == 128}
    cells = []
    for row in data["many"]:
        if row["dim"] != 128:
            continue
        back = decoded.get((row["spec"], row["side"]))
        cells.append(
            [
                code(row["spec"]),
                row["side"].upper(),
                f"{row['native']:.2f}" if "native" in row else "by torch",
                f"{row['torch']:.3f}",
                f"{back['native']:.2f}" if back else "by torch",
            ]
        )
    columns = ("spec", "side", "packed, native", "packed, torch", "unpacked, native")
    return f"{table(columns, cells, left=2)}\n\nBillions of values per second. " + machine(name)


def attention_chart(shape: str) -> str:
    """Draw ms of a step of attention over the context."""
    found = _attention()
    contexts = sorted({key[2] for key in found})
    series: list[Series] = []
    every: list[float] = []
    best = [(t, found[shape, 1, t, "4 bits"]) for t in contexts]
    lines = {
        "torch, the fastest of 8 ways": [(t, r["ms"] * r["times_best_torch"]) for t, r in best]
    }
    for name in DRAWN:
        lines[f"kvpact, {name}"] = [(t, found[shape, 1, t, name]["ms"]) for t in contexts]
    for name, points in lines.items():
        every += [ms for _, ms in points]
        told = [(float(t), ms, f"{name}: {ms:.3g} ms at {t:,} tokens") for t, ms in points]
        series.append(Series(name, told, len(series)))
    marks = [(float(t), f"{t // 1024}k" if t >= 1024 else str(t)) for t in contexts]
    axis = Axis(float(contexts[0]), float(contexts[-1]), marks, log=True)
    title = f"One step of attention, shape {shape}, one thread"
    return draw(title, series, axis, decades(every), "tokens of context", "ms, less is better")


def generate_chart() -> str:
    """Draw ms a token over the bytes of the cache."""
    rows = [r for r in load("generate/generate.json")["rows"] if r["threads"] == 1]
    series: list[Series] = []
    for row in rows:
        name = row["candidate"].replace("fast", "int8")
        told = f"{name}: {row['ms']:.0f} ms a token, {row['cache'] / 1e6:.0f} MB"
        series.append(Series(name, [(row["cache"] / 1e6, row["ms"], told)], len(series)))
    x = Axis(0.0, 300.0, [(float(mb), str(mb)) for mb in range(0, 301, 50)])
    y = Axis(0.0, 200.0, [(float(ms), str(ms)) for ms in range(0, 201, 50)])
    title = "SmolLM2-135M after 6,000 tokens, one thread"
    return draw(title, series, x, y, "MB of cache", "ms a token, less is better")


def pictures() -> dict[str, str]:
    """Return the pictures of the page by file name."""
    return {
        "speed-generate.svg": generate_chart(),
        **{f"speed-attention-{shape.lower()}.svg": attention_chart(shape) for shape in SHAPES},
    }


BLOCKS = {
    "speed-summary": summary,
    "speed-generate": generate,
    "speed-latency": latency,
    "speed-leaderboard": leaderboard,
    "speed-attention": attention,
    "speed-without-bf16": without_bf16,
    "speed-short": short,
    "speed-linearity": linearity,
    "speed-prompts": prompts,
    "speed-encoding": encoding,
}
