"""Tokens and prompts of llama.cpp with kvpact's backend and without it, in turns.

    python benchmarks/llama_cpp.py BUILD [--model GGUF …] [--cache q8_0 q4_0 f16] [--threads 1 2] …

BUILD is a build of llama.cpp, which need know nothing of kvpact. Tokens are
16 after each depth, prompts 512 tokens after those of --prompts: medians of llama-bench.
"""

from pathlib import Path
from typing import Any

import runner

from kvpact.integrations.llama_cpp.programs import pair, programs
from kvpact.integrations.models import SMOLLM2


def timed(bench: Path, model: Path, options: runner.Options) -> list[dict[str, Any]]:
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


def main() -> None:
    options = runner.arguments(
        __doc__, "build", build=Path, model=[Path], cache=["q8_0", "q4_0", "f16"], threads=[1, 2],
        depths=[0, 2048, 6144], prompts=[2048, 4096], rounds=3, out=runner.BENCH,
    )  # fmt: skip
    bench = programs(options.build).get("llama-bench")
    if bench is None:
        raise SystemExit(f"{options.build} has no llama-bench")
    rows = [
        row for model in options.model or SMOLLM2.files() for row in timed(bench, model, options)
    ]
    names = ("model", "cache", "threads", "what")
    cells = [
        [*(x[name] for name in names), f"{x['depth']:,}"]
        + [f"{number:.2f}" for number in (x["ms"], x["kvpact_ms"], x["kvpact_ms"] / x["ms"])]
        for x in rows
    ]
    columns = "model | cache | threads |  | after | llama.cpp, ms a token | with kvpact | ratio"
    title = "llama.cpp with kvpact's backend"
    runner.report(
        options, "llama_cpp", rows, runner.table(columns, cells, 2), ("build",), title=title
    )


if __name__ == "__main__":
    main()
