"""A stored prefix of a model with windows or states: its time, and what rounding costs.

    python benchmarks/stored_prefix.py [--model gemma3] [--tokens 2048] [--spec int:bits=8]

Windows are stored as they are and as 8-bit integers. KL is that of the next 384 tokens of a book,
between the two. One thread; the store is a folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

from kvpact import CompressedCache
from kvpact.data import book_path
from kvpact.evaluate.feed import first_tokens
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.stores import open_store

MORE = 384


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma3")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--spec", default="int:bits=8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    text = book_path().read_text("utf-8")
    ids = first_tokens(tokenizer, text, options.tokens + MORE).view(1, -1)
    prompt, more = ids[:, : options.tokens + 1], ids[:, options.tokens :]
    logits = []
    print(f"{options.tokens} tokens, {options.spec}, {options.model}")
    print(f"{'windows':10}{'computed, s':>14}{'loaded, s':>12}{'sooner by':>12}")
    for windows in ("exact", "int8"):
        with tempfile.TemporaryDirectory() as folder, open_store(folder) as store:
            seconds = []
            for _ in range(2):
                cache = CompressedCache(model, options.spec)
                prefixes = prefix_cache(store, model, cache, fingerprint="one", windows=windows)
                begin = time.perf_counter()
                prefixes.prefill(prompt)
                seconds.append(time.perf_counter() - begin)
        with torch.no_grad():
            logits.append(model(more, **named(cache)).logits[0].double().log_softmax(-1))
        computed, loaded = seconds
        print(f"{windows:10}{computed:14.2f}{loaded:12.3f}{computed / loaded:11.1f}x")
    exact, rounded = logits
    print(f"KL of 8-bit windows: {(exact.exp() * (exact - rounded)).sum(-1).mean().item():.1e}")


if __name__ == "__main__":
    main()
