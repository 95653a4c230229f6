"""Time to the first token of a prompt, in fresh processes: without and with its prefix in a store.

    python benchmarks/first_token.py [--model smollm2] [--tokens 3000] [--spec turboquant:bits=4]

Three processes run `kvpact generate` on the same text: without a store, with an empty one (which
it fills), and with that one. Counted from when the model is loaded; the fingerprint of the model,
which guards the entries, is in it and stands apart, too.
"""

import tempfile
from pathlib import Path

import children
import runner

from kvpact.data import book_path
from kvpact.integrations.models import load_model

FIGURES = {
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


def generated(file: Path, options: runner.Options, *more: object) -> dict[str, float]:
    """Generate two tokens in a new process; return the figures that it prints."""
    words = ["-m", "kvpact", "generate", "--file", file, "--max-new-tokens", 2, *more]
    printed = children.fresh(*words, "--model", options.model, "--spec", options.spec)
    found = {}
    for name, text in FIGURES.items():
        row = next((line for line in printed.splitlines() if text in line), None)
        found[name] = float(row.split()[-1]) if row else 0.0
    return found


def main() -> None:
    options = runner.arguments(__doc__, model="smollm2", tokens=3000, spec="turboquant:bits=4")
    with tempfile.TemporaryDirectory() as name:
        file, store = Path(name) / "prompt.txt", Path(name) / "store"
        file.write_text(prompt_of(options.model, options.tokens), "utf-8")
        use = ("--prefix-store", store)
        works = {"no store": (), "empty store": use, "prefix in the store": use}
        rows = {name: generated(file, options, *more) for name, more in works.items()}
    cells = [[name, *(f"{x:.2f}" for x in row.values())] for name, row in rows.items()]
    first = [row["first token, s"] for row in rows.values()]
    body = [runner.table(["", *FIGURES], cells), "", f"sooner by {first[0] / first[2]:.1f} x"]
    runner.report(options, "first_token", rows, body, ("tokens", "spec", "model"))


if __name__ == "__main__":
    main()
