"""Decode attention over compressed caches, beside torch's and beside the speed of memory.

    python benchmarks/attend.py [--short] [--avx2] [--tokens 1024 4096 …] [--shapes A B] …
    python benchmarks/attend.py --linearity [--tokens 1024 2048 …] …

One token's queries over T cached tokens of one layer, fp32. A: 32 query heads, 8 KV heads, D = 128;
B: 9, 3, 64. Every candidate has a ring of caches of at least --ring megabytes, so that nothing
comes from the processor's caches; all candidates take turns in each round. Medians, quartiles and
ratios in this run are written to DIR/attend.json and attend.md. --short adds contexts of 32 to
256 tokens.

``best torch`` is the fastest of scaled_dot_product_attention and an explicit grouped matmul, in
fp32, bf16 and fp16, and the matmul compiled, over exact K and V. ``read`` is a plain read of as
many bytes as the slots of the same spec have: nothing that uses them can be faster.

With --avx2 our kernels use AVX2 alone, and so does torch, in a process of its own; files are named
attend-avx2.

--linearity takes the contexts of one candidate in turns, from 1k to 128k tokens, and writes
DIR/linearity.json and linearity.md.
"""

import os
import sys

# Before torch is there: compilers that run beside slow it down.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import children
import runner
import torch
from attend_calls import OURS, SHAPES, hopeless, is_torch, our_calls, read_name, torch_calls
from attend_linearity import linearity

SHORT, TOKENS = [32, 64, 128, 256], [1024, 4096, 16384, 65536]
LONG = [1024 * 2**n for n in range(8)]
AVX2 = {
    "KVPACT_SIMD": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""Environment variables under which kvpact and torch compute as on a lesser processor."""


def attention(options: runner.Options) -> list[runner.Row]:
    """Measure all candidates."""
    rows: list[runner.Row] = []
    for shape in options.shapes:
        for tokens in options.tokens:
            torch.set_num_threads(max(options.threads))
            ours = our_calls(tokens, shape, options.ring, options.only)
            for threads in runner.each_threads(options):
                rings = torch_calls(tokens, shape, options.ring, not options.no_compile) | ours
                turns = {name: runner.turn_of(*ring) for name, ring in rings.items()}
                times = runner.in_turns(turns, options.rounds, warm=2, rare=hopeless)
                rows += rows_of(times, shape=shape, tokens=tokens, threads=threads)
    return rows


def rows_of(times: dict[str, list[float]], **where: object) -> list[runner.Row]:
    """Return a row per candidate."""
    medians = runner.medians(times)
    best = min(filter(is_torch, medians), key=medians.get)
    fused, rows = medians.get("fp16, fused"), []
    for name, found in times.items():
        low, middle, high = runner.quartiles(found, 1e3)
        read = medians.get(read_name(name)) if name in OURS else None
        row = {
            "candidate": name,
            "ms": middle,
            "ms_quartiles": [low, high],
            "ms_least": min(found) * 1e3,
            "rounds": len(found),
            "best_torch": best,
            "times_best_torch": medians[best] / middle,
            "times_fp16": fused / middle if fused else None,
            "over_read": middle / read if read else None,
        }
        rows.append(where | row)
    return rows


def tables(rows: list[runner.Row]) -> list[str]:
    """Return a table per shape, thread count and context."""
    lines = []
    columns = " | median ms | quartiles | x best torch | x own fp16 | over its read"
    for key in dict.fromkeys((row["shape"], row["tokens"], row["threads"]) for row in rows):
        part = [r for r in rows if (r["shape"], r["tokens"], r["threads"]) == key]
        cells = []
        for r in part:
            ratios = [r[name] for name in ("times_best_torch", "times_fp16", "over_read")]
            ends = "-".join(f"{x:.3f}" for x in r["ms_quartiles"])
            numbers = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            cells.append([r["candidate"], f"{r['ms']:.3f}", ends, *numbers])
        lines += ["## {}, {} tokens, {} thread(s)".format(*key), ""]
        lines += [f"Best torch: {part[0]['best_torch']}", "", runner.table(columns, cells), ""]
    return lines


def main() -> None:
    options = runner.arguments(
        __doc__, tokens=[int], short=False, shapes=SHAPES, threads=[1, 2], rounds=15, ring=96,
        only=OURS, no_compile=False, avx2=False, linearity=False, out=runner.BENCH,
    )  # fmt: skip
    if options.avx2 and not AVX2.items() <= os.environ.items():
        print(children.fresh(__file__, *sys.argv[1:], environment=AVX2), end="")
        return
    options.tokens = options.tokens or (LONG if options.linearity else TOKENS)
    if options.short:
        options.tokens = sorted({*SHORT, *options.tokens})
    told = {"level": runner.native_level(), "ring, MB": options.ring}
    if options.linearity:
        linearity(options, **told)
        return
    rows, name = attention(options), "attend-avx2" if options.avx2 else "attend"
    told["title"] = "Decode attention"
    runner.report(options, name, rows, tables(rows), ("rounds",), **told)


if __name__ == "__main__":
    main()
