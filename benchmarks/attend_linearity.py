"""Time per token of context: a straight line?"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import runner
from attend_ours import our_ring
from attend_torch import QUICK, exact_ring, grouped, is_torch
from runner import Call, Row
from torch.nn.functional import scaled_dot_product_attention

OURS = ("4 bits", "8 bits", "3 bits", "2 bits", "trellis 4", "fp16, fused")
LONGEST_TORCH = 65536
BOUND = 0.15
TITLE, TOLD = "Time per token of context", ("rounds",)


def linearity(options: argparse.Namespace, **about: object) -> None:
    """Measure, print, and write the report."""
    rows = []
    ours = [name for name in OURS if name in options.only]
    for shape in options.shapes:
        for name in (*ours, *QUICK):
            longest = LONGEST_TORCH if name in QUICK else max(options.tokens)
            tokens = [count for count in options.tokens if count <= longest]
            rings = {str(count): ring(name, count, shape, options.ring) for count in tokens}
            for threads in runner.each_threads(options):
                # The contexts of one candidate take turns: their ratio is what is asked.
                turns = {count: runner.turn_of(*calls) for count, calls in rings.items()}
                times = runner.in_turns(turns, options.rounds, warm=2)
                rows.append({"shape": shape, "threads": threads, "candidate": name, **line(times)})
    runner.report(options, "linearity", rows, body(rows), TOLD, title=TITLE, **about)
    plot(rows, options.out / "linearity.png")


def ring(name: str, tokens: int, shape: str, size: int) -> list[Call]:
    """Return the calls of one candidate at one context."""
    if name not in QUICK:
        return our_ring(name, tokens, shape, size)[0]
    kind, _, dtype = name.partition(" ")
    pairs, q = exact_ring(dtype, tokens, shape, size)
    if kind == "sdpa":
        return [
            lambda k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]
    rows = q.view(1, pairs[0][0].shape[1], -1, q.shape[-1])
    return [lambda k=k, v=v: grouped(rows, k, v) for k, v in pairs]


def line(times: dict[str, list[float]]) -> Row:
    """Return the points, the line through them, and how far from straight they are.

    The line, a fixed cost and a cost per token, is the least squares' of the relative distances.
    """
    tokens = np.array([int(name) for name in times], dtype=float)
    seconds = np.array([*runner.medians(times, 1).values()])
    matrix = np.stack([1 / seconds, tokens / seconds], axis=1)
    fixed, slope = np.linalg.lstsq(matrix, np.ones(len(tokens)), rcond=None)[0]
    each = seconds / tokens
    beside_line = np.abs((fixed + slope * tokens) / seconds - 1)
    beside_median = each / np.median(each) - 1
    worst = int(np.abs(beside_median).argmax())
    points = []
    for count, found in zip(tokens, times.values(), strict=True):
        spread = runner.quartiles(found, 1e9 / count)
        point = {"tokens": int(count), "ns_per_token": spread[1], "ns_quartiles": spread[::2]}
        points.append(point | {"ms": spread[1] * count / 1e6})
    return {
        "points": points,
        "fixed_us": fixed * 1e6,
        "ns_per_token": slope * 1e9,
        "off_line": float(beside_line.max()),
        "off_median": float(abs(beside_median[worst])),
        "off_median_at": int(tokens[worst]),
        "flat_from": next(int(n) for i, n in enumerate(tokens) if flat(each[i:])),
    }


def flat(each: np.ndarray) -> bool:
    """Return whether all are within the bound of their median."""
    return bool(np.abs(each / np.median(each) - 1).max() <= BOUND)


def sentence(row: Row) -> str:
    """Return what was found."""
    verdict = "linear" if row["off_line"] <= BOUND else "not linear"
    tokens = [point["tokens"] for point in row["points"]]
    return (
        f"{row['shape']}, {row['threads']} thread(s), {row['candidate']}: {verdict} within "
        f"{BOUND:.0%} from {tokens[0]} to {tokens[-1]} tokens: no point is further than "
        f"{row['off_line']:.1%} from {row['fixed_us']:.0f} us + {row['ns_per_token']:.1f} ns a "
        f"token; ns/token within {row['off_median']:.1%} of its median (furthest at "
        f"{row['off_median_at']} tokens; within {BOUND:.0%} from {row['flat_from']} tokens)"
    )


def body(rows: list[Row]) -> list[str]:
    """Return the sentences and a table of ns per token."""
    tokens = list(dict.fromkeys(p["tokens"] for row in rows for p in row["points"]))
    cells = []
    for row in rows:
        found = {p["tokens"]: f"{p['ns_per_token']:.1f}" for p in row["points"]}
        name = f"{row['shape']}, {row['threads']} thread(s), {row['candidate']}"
        cells.append([name, *(found.get(count, "-") for count in tokens)])
    said = "ns per token of context (median of the rounds) at that many tokens:"
    sentences = [f"- {sentence(row)}" for row in rows]
    return [*sentences, "", said, "", runner.table(["", *map(str, tokens)], cells)]


def plot(rows: list[Row], path: Path) -> None:
    """Draw ns per token over tokens: what is linear is flat."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["shape"], row["threads"]) for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False)
    for axis, (shape, threads) in zip(axes[0], panels, strict=True):
        for row in rows:
            if (row["shape"], row["threads"]) != (shape, threads):
                continue
            style = "--" if is_torch(row["candidate"]) else "-"
            places = [point["tokens"] for point in row["points"]]
            heights = [point["ns_per_token"] for point in row["points"]]
            low, high = zip(*(point["ns_quartiles"] for point in row["points"]), strict=True)
            drawn = axis.plot(places, heights, style, marker=".", label=row["candidate"])
            axis.fill_between(places, low, high, alpha=0.2, color=drawn[0].get_color())
        axis.set(xscale="log", yscale="log", title=f"{shape}, {threads} thread(s)")
        axis.set(xlabel="tokens of context", ylabel="ns per token of context (flat: linear)")
        axis.grid(alpha=0.3, which="both")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
