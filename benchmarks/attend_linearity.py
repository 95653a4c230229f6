"""Time per token of context: a straight line?"""

import numpy as np
import runner
from attend_calls import QUICK, our_ring, torch_calls
from runner import Row

OURS = ("4 bits", "8 bits", "3 bits", "2 bits", "trellis 4", "fp16, fused")
LONGEST_TORCH = 65536
BOUND = 0.15


def linearity(options: runner.Options, **about: object) -> None:
    """Measure, print, and write the report."""
    rows, about["title"] = [], "Time per token of context"
    ours = [name for name in OURS if name in options.only]
    for shape in options.shapes:
        for name in (*ours, *QUICK):
            longest = LONGEST_TORCH if name in QUICK else max(options.tokens)
            tokens = [count for count in options.tokens if count <= longest]
            rings = {
                str(count): our_ring(name, count, shape, options.ring)[0]
                if name in OURS
                else torch_calls(count, shape, options.ring, False)[name]
                for count in tokens
            }
            for threads in runner.each_threads(options):
                # The contexts of one candidate take turns: their ratio is what is asked.
                turns = {count: runner.turn_of(*calls) for count, calls in rings.items()}
                times = runner.in_turns(turns, options.rounds, warm=2)
                rows.append({"shape": shape, "threads": threads, "candidate": name, **line(times)})
    runner.report(options, "linearity", rows, body(rows), ("rounds",), **about)


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
