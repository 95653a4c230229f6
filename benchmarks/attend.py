"""Decode attention over compressed caches, beside torch's and beside the speed of memory.

    python benchmarks/attend.py [--short] [--avx2] [--tokens 1024 4096 …] [--shapes A B]
                                [--threads 1 2] [--rounds 15] [--ring 96] [--out DIR]
    python benchmarks/attend.py --linearity [--tokens 1024 2048 …] …

One token's queries over T cached tokens of one layer, fp32. A: 32 query heads, 8 KV heads, D = 128;
B: 9, 3, 64. Every candidate has a ring of caches of at least --ring megabytes, so that nothing
comes from the processor's caches; all candidates take turns in each round. Medians, quartiles and
ratios in this run are written to DIR/attend.json and attend.md. --short adds contexts of 32 to
256 tokens.

``best torch`` is the fastest of scaled_dot_product_attention and an explicit grouped matmul, in
fp32, bf16 and fp16, and the matmul compiled, over exact K and V. ``read`` is a plain read of as
many bytes as the slots of the same spec have: nothing that uses them can be faster.

Beside it, for information, stands torch in a process of its own whose libraries may not use bf16
dot products, as on processors that have none; not where that changes nothing. With --avx2 our
kernels use AVX2 alone, and so does torch in that process; files are named attend-avx2.

--linearity takes the contexts of one candidate in turns, from 1k to 128k tokens, and writes
DIR/linearity.json, linearity.md and linearity.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack

# Before torch is there: threads that spin slow down the other process, and so do compilers.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import runner
import torch
from attend_linearity import linearity
from attend_ours import OURS, SHAPES, our_calls, read_name
from attend_torch import AVX2, CAPS, NO_BF16, Capped, capped, hopeless, is_torch, torch_calls
from machine import flags

SHORT, TOKENS = [32, 64, 128, 256], [1024, 4096, 16384, 65536]
LONG = [1024 * 2**n for n in range(8)]


def lesser(stack: ExitStack, avx2: bool) -> tuple[Capped | None, str | None]:
    """Return torch with less of the processor, and what it lacks, where that is another torch."""
    cap = AVX2 if avx2 else NO_BF16
    if not avx2 and not flags() & {"avx512_bf16", "amx_bf16"}:
        return None, None
    other = stack.enter_context(capped(CAPS[cap]))
    if not avx2 and not other.changes():
        print(f"best torch {cap}: the same as best torch, left out")
        return None, None
    return other, cap


def attention(
    options: argparse.Namespace, other: Capped | None, cap: str | None
) -> list[runner.Row]:
    """Measure all candidates."""
    rows: list[runner.Row] = []
    for shape in options.shapes:
        for tokens in options.tokens:
            torch.set_num_threads(max(options.threads))
            ours = our_calls(tokens, shape, options.ring, options.only)
            for threads in runner.each_threads(options):
                what = (tokens, shape, options.ring, not options.no_compile)
                turns = {n: runner.turn_of(*c) for n, c in (torch_calls(*what) | ours).items()}
                if other:
                    there = other.prepare(threads, *what)
                    turns |= {f"{name}, {cap}": turn for name, turn in there.items()}
                times = runner.in_turns(turns, options.rounds, warm=2, rare=hopeless)
                rows += rows_of(times, cap, shape=shape, tokens=tokens, threads=threads)
    return rows


def rows_of(times: dict[str, list[float]], cap: str | None, **where: object) -> list[runner.Row]:
    """Return a row per candidate; names that end with the cap are the capped process's."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = {}
    for kind in (False, True):
        same = (n for n in medians if is_torch(n) and (bool(cap) and n.endswith(cap)) is kind)
        best[kind] = min(same, key=medians.get, default=None)
    fused, lesser = medians.get("fp16, fused"), best[True]
    rows = []
    for name, found in times.items():
        low, middle, high = runner.quartiles(found)
        read = medians.get(read_name(name)) if name in OURS else None
        row = {
            "candidate": name,
            "ms": middle * 1e3,
            "ms_quartiles": [low * 1e3, high * 1e3],
            "ms_least": min(found) * 1e3,
            "rounds": len(found),
            "best_torch": best[False],
            "times_best_torch": medians[best[False]] / middle,
            "best_torch_capped": lesser,
            "times_best_torch_capped": medians[lesser] / middle if lesser else None,
            "times_fp16": fused / middle if fused else None,
            "over_read": middle / read if read else None,
        }
        rows.append(where | row)
    return rows


def tables(rows: list[runner.Row], cap: str | None) -> list[str]:
    """Return a table per shape, thread count and context."""
    lines = []
    if cap:
        lines += [
            f"*Best torch, {cap}*, is for information: the same calls in a process of their own, "
            "in which torch's libraries may use less of the processor.",
            "",
        ]
    columns = ["", "median ms", "quartiles", "x best torch"]
    columns += [*([f"x best torch, {cap}"] if cap else []), "x own fp16", "over its read"]
    keys = ["times_best_torch", *(["times_best_torch_capped"] if cap else [])]
    for key in dict.fromkeys((row["shape"], row["tokens"], row["threads"]) for row in rows):
        part = [r for r in rows if (r["shape"], r["tokens"], r["threads"]) == key]
        lesser = f"; {cap}: {part[0]['best_torch_capped']}" if cap else ""
        cells = []
        for r in part:
            ratios = [r[name] for name in (*keys, "times_fp16", "over_read")]
            ends = "-".join(f"{x:.3f}" for x in r["ms_quartiles"])
            numbers = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            cells.append([r["candidate"], f"{r['ms']:.3f}", ends, *numbers])
        lines += ["## {}, {} tokens, {} thread(s)".format(*key), ""]
        lines += [f"Best torch: {part[0]['best_torch']}{lesser}", ""]
        lines += [runner.table(columns, cells), ""]
    return lines


def main() -> None:
    """Measure, print, and write the report."""
    options = runner.arguments(
        __doc__, tokens=[int], short=False, shapes=SHAPES, threads=[1, 2], rounds=15, ring=96,
        only=OURS, no_compile=False, avx2=False, linearity=False, out=runner.BENCH,
    )  # fmt: skip
    options.tokens = options.tokens or (LONG if options.linearity else TOKENS)
    if options.short:
        options.tokens = sorted({*SHORT, *options.tokens})
    if options.avx2:
        os.environ["KVPACT_SIMD"] = "avx2"
    about = {"level": runner.native_level(), "ring, MB": options.ring}
    if options.linearity:
        linearity(options, **about)
        return
    with ExitStack() as stack:
        other, cap = lesser(stack, options.avx2)
        rows = attention(options, other, cap)
    name, found = "attend-avx2" if options.avx2 else "attend", {"cap": cap, "rows": rows}
    told = {"title": "Decode attention", **about}
    runner.report(options, name, found, tables(rows, cap), ("rounds",), **told)


if __name__ == "__main__":
    main()
