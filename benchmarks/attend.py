"""Decode attention over compressed caches, beside torch's and beside the speed of memory.

    python benchmarks/attend.py [--tokens 1024 4096 …] [--shapes A B] [--threads 1 2] [--out DIR]

One token's queries over T cached tokens of one layer, fp32. A: 32 query heads, 8 KV heads, D = 128;
B: 9, 3, 64. Every candidate has a ring of caches of at least --ring megabytes, so that nothing
comes from the processor's caches; all candidates take turns in each round. Medians, quartiles and
ratios in this run are written to DIR/attend.json, attend.md and attend.png.

``read`` is a plain read of the bytes of the 4-bit slots: nothing that uses them can be faster.
``best torch`` is the fastest of scaled_dot_product_attention and an explicit grouped matmul, in
fp32, bf16 and fp16, and the matmul compiled, over exact K and V.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.attention import attend
from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu import library

SHAPES = {"A": (8, 4, 128), "B": (3, 3, 64)}  # KV heads, query heads per KV head, width
OURS = {
    "fp16, fused": ("none:dtype=fp16", "exact"),
    "4 bits": ("turboquant:bits=4", "exact"),
    "4 bits, fast": ("turboquant:bits=4", "fast"),
    "8 bits": ("int:bits=8", "exact"),
    "8 bits, fast": ("int:bits=8", "fast"),
    "3 bits": ("turboquant:bits=3", "exact"),
    "2 bits": ("turboquant:bits=2", "exact"),
    "2 bits, fast": ("turboquant:bits=2", "fast"),
    "kivi 4": ("kivi:bits=4", "exact"),
    "kvarn 4": ("kvarn:bits=4", "exact"),
    "centred 4": ("turboquant:bits=4,center=64", "exact"),
    "4 bits, paged": ("turboquant:bits=4", "paged"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Call = Callable[[], object]
Row = dict[str, Any]


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention as two matrix products per KV head: what torch is fast at."""
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def copies(size: int, ring: int) -> int:
    """Return how many caches of `size` bytes make a ring of `ring` megabytes."""
    return max(1, math.ceil(ring * 1e6 / size))


def torch_calls(tokens: int, shape: str, ring: int, compiled: bool) -> dict[str, list[Call]]:
    """Return torch's candidates, a call per cache of the ring."""
    heads, groups, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    calls: dict[str, list[Call]] = {}
    for name, dtype in DTYPES.items():
        count = copies(2 * heads * tokens * dim * dtype.itemsize, ring)
        k, v = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in "kv")
        pairs = [(k.clone(), v.clone()) for _ in range(count)]
        q = torch.randn(1, heads * groups, 1, dim, generator=generator).to(dtype)
        rows = q.view(1, heads, groups, dim)
        calls[f"sdpa {name}"] = [
            lambda k=k, v=v, q=q: scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]
        calls[f"matmul {name}"] = [lambda k=k, v=v, q=rows: grouped(q, k, v) for k, v in pairs]
        if compiled and name != "fp16":
            fast = torch.compile(grouped, dynamic=False)
            fast(rows, k, v)
            calls[f"matmul {name}, compiled"] = [
                lambda k=k, v=v, q=rows, fast=fast: fast(q, k, v) for k, v in pairs
            ]
    return calls


def our_calls(tokens: int, shape: str, ring: int, names: list[str]) -> dict[str, list[Call]]:
    """Return kvpact's candidates and the plain read, a call per cache of the ring."""
    heads, groups, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(1, heads * groups, 1, dim, generator=generator)
    new = torch.randn(1, heads, 1, dim, generator=generator)
    config = AttendConfig()
    calls: dict[str, list[Call]] = {}
    for name in names:
        spec, kernel = OURS[name]
        geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
        first = create_cache(spec, geometry, kernel="exact" if kernel == "paged" else kernel)
        for start in range(0, tokens, 2048):
            size = (1, heads, min(2048, tokens - start), dim)
            first.store(0, *(torch.randn(size, generator=generator) for _ in "kv"))
        count = copies(first.memory_usage(), ring)
        if kernel == "paged":
            views = paged_views(spec, geometry, tokens, count, generator)
        else:
            caches = [first]
            for _ in range(count - 1):
                caches.append(first.fork())
                caches[-1].select(torch.tensor([0]))
            views = [cache._layers[0]._view(None) for cache in caches]
        calls[name] = [lambda view=view: attend(view, new, new, q, config) for view in views]
        if name == "4 bits":
            size = sum(t.nbytes for t in first._layers[0].tensors()) // heads // 2
            blocks = [torch.randint(1, 99, (2 * heads, size // 4)) for _ in range(count)]
            calls["read"] = [reading(block, size) for block in blocks]
    return calls


def reading(block: torch.Tensor, size: int) -> Call:
    """Return a call that reads the rows of `block`, `size` bytes each."""
    rows = [row.data_ptr() for row in block]
    return lambda: library().read(rows, size, torch.get_num_threads()) or block


def paged_views(
    spec: str, geometry: CacheGeometry, tokens: int, count: int, generator: torch.Generator
) -> list[Any]:
    """Return views of sequences whose pages of 128 tokens lie in turns."""
    from kvpact import PagedKVCache

    count = min(count, max(2, 2**18 // tokens))
    pages = count * (-(-tokens // 128) + 1)
    cache = PagedKVCache(spec, geometry, pages, 128, kernel="exact")
    seqs = [cache.allocate() for _ in range(count)]
    shape = (geometry.num_kv_heads, 1024, geometry.head_dim)
    for start in range(0, tokens, 1024):
        part = min(1024, tokens - start)
        k, v = (torch.randn(shape, generator=generator)[:, :part] for _ in "kv")
        for seq in seqs:
            cache.append(0, {seq: (k, v)})
    return [cache._sequence(seq).layers[0]._view(None) for seq in seqs]


def measure(calls: dict[str, list[Call]], rounds: int) -> dict[str, list[float]]:
    """Return seconds per call of each candidate, one figure a round, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    place = dict.fromkeys(calls, 0)
    for turn in range(rounds + 2):
        for name, ring in calls.items():
            todo = max(1, min(len(ring), 12))
            start = time.perf_counter()
            for _ in range(todo):
                ring[place[name]]()
                place[name] = (place[name] + 1) % len(ring)
            if turn >= 2:
                times[name].append((time.perf_counter() - start) / todo)
    return times


def rows_of(times: dict[str, list[float]], tokens: int, shape: str, threads: int) -> list[Row]:
    """Return a row per candidate."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    torches = [name for name in medians if name.startswith(("sdpa", "matmul"))]
    best = min(torches, key=lambda name: medians[name])
    rows = []
    for name, found in times.items():
        low, _, high = statistics.quantiles(found, n=4)
        rows.append(
            {
                "shape": shape,
                "tokens": tokens,
                "threads": threads,
                "candidate": name,
                "ms": medians[name] * 1e3,
                "ms_quartiles": [low * 1e3, high * 1e3],
                "ms_least": min(found) * 1e3,
                "best_torch": best,
                "times_best_torch": medians[best] / medians[name],
                "times_fp16": medians.get("fp16, fused", math.nan) / medians[name],
                "over_read": medians[name] / medians.get("read", math.nan),
            }
        )
    return rows


def processor() -> str:
    """Return the processor's name and instruction sets that matter, as far as they are known."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else ''}".strip()


def markdown(rows: list[Row], about: dict[str, Any]) -> str:
    """Return a table per shape, thread count and context."""
    lines = ["# Decode attention\n", ", ".join(f"{k}: {v}" for k, v in about.items()), ""]
    for key in dict.fromkeys((row["shape"], row["threads"], row["tokens"]) for row in rows):
        shape, threads, tokens = key
        part = [r for r in rows if (r["shape"], r["threads"], r["tokens"]) == key]
        lines += [
            f"\n## {shape}, {tokens} tokens, {threads} thread(s); best torch: "
            f"{part[0]['best_torch']}\n",
            "| | median ms | quartiles | x best torch | x own fp16 | over the read |",
            "|---|---|---|---|---|---|",
        ]
        for r in part:
            low, high = r["ms_quartiles"]
            lines.append(
                f"| {r['candidate']} | {r['ms']:.3f} | {low:.3f}-{high:.3f} | "
                f"{r['times_best_torch']:.2f} | {r['times_fp16']:.2f} | {r['over_read']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw milliseconds over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["shape"], row["threads"]) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), squeeze=False)
    for axis, (shape, threads) in zip(axes[0], panels, strict=True):
        part = [r for r in rows if (r["shape"], r["threads"]) == (shape, threads)]
        axis.set_prop_cycle(color=plt.get_cmap("tab20").colors)
        for name in dict.fromkeys(r["candidate"] for r in part):
            points = [(r["tokens"], r["ms"]) for r in part if r["candidate"] == name]
            style = "--" if name.startswith(("sdpa", "matmul")) else "-"
            axis.plot(*zip(*points, strict=True), style, marker=".", label=name)
        axis.set(xscale="log", yscale="log", title=f"{shape}, {threads} thread(s)")
        axis.set(xlabel="tokens", ylabel="ms a step")
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ring", type=int, default=96, help="megabytes of each candidate's ring")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    try:
        level = library().level
    except BackendUnavailable as error:
        raise SystemExit(f"no native kernels to measure: {error}") from None
    about = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "level": level,
        "rounds": options.rounds,
        "ring, MB": options.ring,
    }
    rows: list[Row] = []
    for shape in options.shapes:
        for tokens in options.tokens:
            torch.set_num_threads(max(options.threads))
            calls = our_calls(tokens, shape, options.ring, options.only)
            for threads in options.threads:
                torch.set_num_threads(threads)
                # Compiled again for each number of threads, which is part of the code.
                torch.compiler.reset()
                torches = torch_calls(tokens, shape, options.ring, not options.no_compile)
                times = measure(torches | calls, options.rounds)
                rows += rows_of(times, tokens, shape, threads)
                print(markdown(rows[-len(times) :], about).split("\n\n", 2)[2], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attend.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    (options.out / "attend.md").write_text(markdown(rows, about))
    try:
        plot(rows, options.out / "attend.png")
    except ImportError:
        print("no plot: matplotlib is missing")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
