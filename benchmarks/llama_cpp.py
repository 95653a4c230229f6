"""Tokens and prompts of llama.cpp with kvpact's backend and without it, in turns.

    python benchmarks/llama_cpp.py BUILD [--model GGUF …] [--cache q8_0 q4_0 f16] [--threads 1 2]
        [--depths 0 2048 6144] [--prompts 2048 4096] [--rounds 3] [--out DIR]

BUILD is a build of llama.cpp, which need know nothing of kvpact. Tokens are
16 after each depth, prompts 512 tokens after those of --prompts: medians of llama-bench.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import about, head, save

from kvpact.integrations.llama_cpp.programs import pair, programs
from kvpact.integrations.models import SMOLLM2


def timed(bench: Path, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the times of tokens and prompts, with kvpact and without."""
    works = [("token", depth, ["-p", 0, "-n", 16]) for depth in options.depths]
    works += [("prompt", depth, ["-p", 512, "-n", 0]) for depth in options.prompts]
    rows = []
    for cache in options.cache:
        for threads in options.threads:
            for what, depth, words in works:
                words = ["-m", model, "-fa", 1, "-ctk", cache, "-ctv", cache, "-t", threads,
                         "-d", depth, *words]  # fmt: skip
                place = {"model": model.name, "what": what, "cache": cache, "threads": threads}
                rows.append({**place, "depth": depth, **pair(bench, words, options.rounds)})
                print(rows[-1], flush=True)
    return rows


def report(rows: list[dict[str, Any]], found: dict[str, object]) -> str:
    """Return the table."""
    lines = ["# llama.cpp with kvpact's backend", "", head(found), ""]
    lines += ["| model | cache | threads | | after | llama.cpp, ms a token | with kvpact | ratio |",
              "|---|---|---:|---|---:|---:|---:|---:|"]  # fmt: skip
    lines += [
        f"| {x['model']} | {x['cache']} | {x['threads']} | {x['what']} | {x['depth']:,} | "
        f"{x['ms']:.2f} | {x['kvpact_ms']:.2f} | {x['kvpact_ms'] / x['ms']:.2f} |"
        for x in rows
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--model", type=Path, nargs="+")
    parser.add_argument("--cache", nargs="+", default=["q8_0", "q4_0", "f16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 2048, 6144])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    bench = programs(options.build).get("llama-bench")
    if bench is None:
        parser.error(f"{options.build} has no llama-bench")
    models = options.model or SMOLLM2.files()
    rows = [row for model in models for row in timed(bench, model, options)]
    found = about(build=str(options.build))
    save(options.out, "llama_cpp", found, rows, report(rows, found))
    print(report(rows, found))


if __name__ == "__main__":
    main()
