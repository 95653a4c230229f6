"""A stored prefix of a model with windows or states: its time, and what rounding costs.

    python benchmarks/stored_prefix.py [--model gemma3] [--tokens 2048] [--spec int:bits=8]

Windows are stored as they are and as 8-bit integers. KL is that of the next 384 tokens of a book,
between the two. One thread; the store is a folder.
"""

import tempfile

import runner
import torch

from kvpact import CompressedCache
from kvpact.integrations.transformers import prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.stores import open_store

MORE = 384


@torch.no_grad()
def main() -> None:
    options = runner.arguments(__doc__, model="gemma3", tokens=2048, spec="int:bits=8")
    torch.set_num_threads(1)
    model, ids = runner.book(options.model, options.tokens + MORE)
    prompt, more = ids[:, : options.tokens + 1], ids[:, options.tokens :]
    logits, rows = [], []
    for windows in ("exact", "int8"):
        with tempfile.TemporaryDirectory() as folder, open_store(folder) as store:
            seconds = []
            for _ in range(2):
                cache = CompressedCache(model, options.spec)
                prefixes = prefix_cache(store, model, cache, fingerprint="one", windows=windows)
                seconds.append(runner.turn_of(lambda x=prefixes: x.prefill(prompt))())
        logits.append(model(more, **named(cache)).logits[0].double().log_softmax(-1))
        rows.append(dict(zip(("windows", "computed", "loaded"), (windows, *seconds), strict=True)))
    exact, rounded = logits
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean().item()
    cells = []
    for r in rows:
        figures = f"{r['computed']:.2f}", f"{r['loaded']:.3f}"
        cells.append([r["windows"], *figures, f"{r['computed'] / r['loaded']:.1f}x"])
    body = runner.table("windows | computed, s | loaded, s | sooner by", cells)
    told = ("tokens", "spec", "model")
    found = {"rows": rows, "kl": kl}
    runner.report(
        options, "stored_prefix", found, [body, "", f"KL of 8-bit windows: {kl:.1e}"], told
    )


if __name__ == "__main__":
    main()
