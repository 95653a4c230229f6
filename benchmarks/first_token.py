"""Time to the first token of a prompt, in fresh processes: without and with its prefix in a store.

    python benchmarks/first_token.py [--model smollm2] [--tokens 3000] [--spec turboquant:bits=4]

Three processes run `kvpact generate` on the same text: without a store, with an empty one (which
it fills), and with that one. Counted from when the model is loaded; the fingerprint of the model,
which guards the entries, is in it and stands apart, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kvpact.data import book_path
from kvpact.integrations.models import load_model

ROWS = {
    "first token, s": "first token",
    "fingerprint, s": "fingerprint of the model",
    "loading, s": "loading the prefix",
    "tokens loaded": "prompt tokens from the store",
}


def prompt_of(model: str, tokens: int) -> str:
    """Return a text of about so many tokens."""
    _, tokenizer = load_model(model)
    text = book_path().read_text("utf-8")[: 8 * tokens]
    return tokenizer.decode(tokenizer(text)["input_ids"][:tokens])


def run(file: Path, options: argparse.Namespace, *more: str) -> dict[str, float]:
    """Generate two tokens in a new process; return the figures that it prints."""
    command = [sys.executable, "-m", "kvpact", "generate", "--file", str(file)]
    command += ["--model", options.model, "--spec", options.spec, "--max-new-tokens", "2", *more]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for name, text in ROWS.items():
        row = next((line for line in lines if text in line), None)
        found[name] = float(row.split()[-1]) if row else 0.0
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--spec", default="turboquant:bits=4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file, store = Path(name) / "prompt.txt", Path(name) / "store"
        file.write_text(prompt_of(options.model, options.tokens), "utf-8")
        use = ("--prefix-store", str(store))
        runs = {
            "no store": run(file, options),
            "empty store": run(file, options, *use),
            "prefix in the store": run(file, options, *use),
        }
    print(f"{options.tokens} tokens, {options.spec}, {options.model}")
    print(f"{'':22}" + "".join(f"{name:>16}" for name in ROWS))
    for title, found in runs.items():
        print(f"{title:22}" + "".join(f"{value:16.2f}" for value in found.values()))
    first = [found["first token, s"] for found in runs.values()]
    print(f"sooner by {first[0] / first[2]:.1f} x")


if __name__ == "__main__":
    main()
