"""Quality on a real model: the figures of the README, and what sinks, window and exact chunks do.

    python benchmarks/quality.py [--tokens 3000] [--out benchmarks/results/quality]

Runs SmolLM2-135M over an excerpt of Northanger Abbey by the protocol of ARCHITECTURE.md, three
times: as shipped (4 sinks, a window of 64), as the pure codec (`sinks=0,window=0`), and packed
only (new tokens, too, are attended as stored). Prints the tables and the ratios of the KLs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpact import parse_spec
from kvpact.data import book_path
from kvpact.evaluate import evaluate_text, write_report
from kvpact.integrations.models import load_model

SPECS = (
    "fp8",
    "int:bits=8",
    "int:bits=4",
    "turboquant:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=3,center=64",
    "turboquant:bits=2,center=64",
    "kvarn:bits=3",
    "kivi:bits=2",
)
MODES = ("shipped", "pure", "packed-only")


def measure(tokens: int, out: Path | None = None, specs: tuple[str, ...] = SPECS) -> dict:
    """Return the mean KL (and the whole row) by mode and spec."""
    model, tokenizer = load_model()
    rows = {}
    for mode in MODES:
        wanted = [parse_spec(spec) for spec in specs]
        if mode != "shipped":
            wanted = [spec.with_options(sinks=0, window=0) for spec in wanted]
        result = evaluate_text(
            model,
            tokenizer,
            book_path().read_text("utf-8"),
            wanted,
            tokens=tokens,
            packed_only=mode == "packed-only",
            model_name="SmolLM2-135M-Instruct",
            text_name="Northanger Abbey",
            progress=lambda done, total, what, mode=mode: print(
                f"\r{mode}: {done}/{total} {what:40.40}", end="", flush=True
            ),
        )
        print()
        if out is not None:
            write_report(result, out / mode)
        rows[mode] = dict(zip(specs, result.rows[1:], strict=True))
    return rows


def ratio_table(rows: dict) -> str:
    """Return a Markdown table: mean KL by mode, and how many times the shipped one it is."""
    lines = ["| spec | shipped | pure codec | ratio | packed only | ratio |", "|---|" + "--:|" * 5]
    for spec, shipped in rows["shipped"].items():
        pure, packed = rows["pure"][spec], rows["packed-only"][spec]
        lines.append(
            f"| `{spec}` | {shipped.kl_mean:.3g} | {pure.kl_mean:.3g} "
            f"| {pure.kl_mean / shipped.kl_mean:.2f} | {packed.kl_mean:.3g} "
            f"| {packed.kl_mean / shipped.kl_mean:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality"))
    options = parser.parse_args()
    table = ratio_table(measure(options.tokens, options.out))
    title = f"# Mean KL by mode, {options.tokens} tokens\n\n"
    (options.out / "ratios.md").write_text(title + table + "\n", "utf-8")
    print(table)


if __name__ == "__main__":
    main()
