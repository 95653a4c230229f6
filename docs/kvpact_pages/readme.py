"""What ``README.md`` takes from committed results."""

from __future__ import annotations

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
    rows = {r["candidate"]: r for r in load("generate/generate.json")["rows"] if r["threads"] == 1}
    exact, ours = rows["DynamicCache, fp32"], rows["turboquant:bits=4, fp32"]
    return table(
        ("", "measured", "command"),
        [
            [
                "quality at 4 bits",
                f"KL of {kl(smollm2)} (SmolLM2-135M) and {kl(gemma3)} (Gemma 3 270M)",
                "`kvpact eval trellis:bits=4 --model smollm2 --tokens 2048`, "
                "`kvpact eval trellis:bits=4 --model gemma3 --tokens 1536`",
            ],
            [
                "a decode step of SmolLM2-135M after 6,000 tokens, `turboquant:bits=4`",
                f"{exact['ms'] / ours['ms']:.2f} times as fast as transformers' `DynamicCache` in "
                f"fp32, in {ours['cache'] / exact['cache']:.3f} of its bytes (one thread, AVX2)",
                "`make bench-quanto`",
            ],
            [
                "the first token of a 2,000-token prompt that another vLLM process has computed",
                "7.4 times as soon, loaded from a folder in 0.266 of fp16's bytes (SmolLM2-135M)",
                "`.venv-vllm/bin/python benchmarks/vllm_shared_prefix.py`",
            ],
        ],
        left=3,
    )


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


def _rows(model: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = load(f"models/{model}/eval.json")
    return rows


BLOCKS = {"readme-figures": figures, "readme-specs": specs}
