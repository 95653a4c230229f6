"""What ``README.md`` takes from committed results."""

from __future__ import annotations

from typing import Any

from kvpact_pages.results import code, kl, load, table

RECOMMENDED = {
    "int:bits=8": "next to no loss, in about half of fp16's bytes",
    "trellis:bits=4": "the default",
    "trellis:bits=3": "a fifth of fp16's bytes",
    "trellis:bits=2": "a seventh of fp16's bytes",
    "turboquant:bits=4": "quicker to write than `trellis`; not for models with QK-norm",
}


def figures() -> str:
    """Return three figures, each with the commands that print it."""
    smollm2, gemma3 = (
        next(r["kl_mean"] for r in _rows(model) if r["spec"] == "trellis:bits=4")
        for model in ("smollm2", "gemma3")
    )
    after, steps = _longest_steps("trellis:bits=4")
    return table(
        ("", "measured", "command"),
        [
            [
                "quality at 4 bits",
                f"KL of {kl(smollm2)} (SmolLM2-135M) and {kl(gemma3)} (Gemma 3 270M)",
                "`kvpact eval trellis:bits=4`, `kvpact eval trellis:bits=4 --model gemma3`",
            ],
            [
                "what a process takes for a prompt of 4,000 tokens and 64 steps, as the kernel "
                "counts it (SmolLM2-135M, fp32, 2 threads)",
                f"{_process('trellis:bits=4', 'after')} MiB, {_process('trellis:bits=4', 'peak')} "
                f"at the peak; with `DynamicCache` {_process('DynamicCache', 'after')} and "
                f"{_process('DynamicCache', 'peak')}",
                "`python benchmarks/process.py`",
            ],
            [
                f"a decode step after {after:,} tokens, `trellis:bits=4`",
                f"{1 / steps['smollm2']['ratio'][1]:.1f} times as fast as with `DynamicCache` "
                f"(SmolLM2-135M), {1 / steps['gemma3']['ratio'][1]:.1f} times (Gemma 3 270M, 3 of "
                "18 layers compressed)",
                "`make leaderboard-run`",
            ],
            [
                "the first token of a 2,000-token prompt that another vLLM process has computed",
                "7.4 times sooner, loaded from a folder; the prefix takes 27 % of fp16's bytes "
                "(SmolLM2-135M)",
                "`.venv-vllm/bin/python benchmarks/vllm_shared_prefix.py`",
            ],
        ],
        left=3,
    )


def _process(spec: str, size: str) -> str:
    """Return MiB that a process took for a cache, `after` or at the `peak`."""
    work = {"model": "smollm2", "dtype": "float32", "tokens": 4000, "chunk": 0, "threads": 2}
    rows = load("memory/process.json")["rows"]
    found = next(r for r in rows if r["spec"] == spec and work.items() <= r.items())
    return f"{found[size] / (1 << 20):.0f}"


def specs() -> str:
    """Return the specs to begin with."""
    found = [{r["spec"]: r for r in _rows(model)} for model in ("smollm2", "gemma3")]
    rows = []
    for spec, when in RECOMMENDED.items():
        bits = sorted({f"{each[spec]['slot_bits_per_value']:.1f}" for each in found})
        kls = [kl(each[spec]["kl_mean"]) for each in found]
        rows.append([code(spec), when, " to ".join(bits), *kls])
    columns = ("spec", "what it is for", "bits per value", "KL, SmolLM2-135M", "KL, Gemma 3 270M")
    return table(columns, rows, left=2)


def _longest_steps(cache: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the longest context of the leaderboard, and a cache's step after it by model."""
    rows = [row for row in load("leaderboard/own.json")["rows"] if row["cache"] == cache]
    steps = {row["model"]: row["steps"][-1] for row in rows}
    return steps["smollm2"]["tokens"], steps


def _rows(model: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = load(f"models/{model}/eval.json")
    return rows


BLOCKS = {"readme-figures": figures, "readme-specs": specs}
