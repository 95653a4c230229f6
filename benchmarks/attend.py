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
import json
import os
from contextlib import ExitStack
from pathlib import Path

# Before torch is there: threads that spin slow down the other process, and so do compilers.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from attend_linearity import linearity
from attend_ours import OURS, SHAPES, our_calls
from attend_report import Row, markdown, rows_of
from attend_rounds import measure, turn_of
from attend_torch import AVX2, CAPS, NO_BF16, Capped, capped, torch_calls
from machine import about, flags

from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu import library

SHORT = [32, 64, 128, 256]
TOKENS = [1024, 4096, 16384, 65536]
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


def attention(options: argparse.Namespace, other: Capped | None, cap: str | None) -> list[Row]:
    """Measure all candidates and print their tables."""
    rows: list[Row] = []
    for shape in options.shapes:
        for tokens in options.tokens:
            torch.set_num_threads(max(options.threads))
            ours = our_calls(tokens, shape, options.ring, options.only)
            for threads in options.threads:
                torch.set_num_threads(threads)
                what = (tokens, shape, options.ring, not options.no_compile)
                turns = {n: turn_of(c) for n, c in (torch_calls(*what) | ours).items()}
                if other:
                    there = other.prepare(threads, *what)
                    turns |= {f"{name}, {cap}": turn for name, turn in there.items()}
                times = measure(turns, options.rounds)
                found = rows_of(times, cap, shape=shape, tokens=tokens, threads=threads)
                print(markdown(found, {}, cap).partition("\n## ")[2], flush=True)
                rows += found
    return rows


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--short", action="store_true", help="32 to 256 tokens, too")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ring", type=int, default=96, help="megabytes of each candidate's ring")
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--avx2", action="store_true", help="our kernels at AVX2 alone")
    parser.add_argument("--linearity", action="store_true", help="time per token over contexts")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    if options.tokens is None:
        options.tokens = LONG if options.linearity else TOKENS
    if options.short:
        options.tokens = sorted({*SHORT, *options.tokens})
    return options


def main() -> None:
    """Measure, print, and write the report."""
    options = arguments()
    if options.avx2:
        os.environ["KVPACT_SIMD"] = "avx2"
    try:
        level = library().level
    except BackendUnavailable as error:
        raise SystemExit(f"no native kernels to measure: {error}") from None
    found = about(level=level, rounds=options.rounds) | {"ring, MB": options.ring}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.linearity:
        linearity(options, found)
        return
    with ExitStack() as stack:
        other, cap = lesser(stack, options.avx2)
        rows = attention(options, other, cap)
    path = options.out / ("attend-avx2" if options.avx2 else "attend")
    written = {"about": found, "cap": cap, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(written, indent=1))
    path.with_suffix(".md").write_text(markdown(rows, found, cap))
    print(f"written to {path}.json and .md")


if __name__ == "__main__":
    main()
