"""Layers with sliding attention, exact and packed: bytes, KL and the time of a step.

    python benchmarks/sliding.py [--model gemma3] [--tokens 512 2048 4096] [--scored 1408]

KL is the mean over a book's tokens behind the first chunk of 256, against transformers' own cache.
Bytes are with K and V in bfloat16. Steps of a context go round the caches, one thread; the time is
the median.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpact import CompressedCache
from kvpact.data import book_path
from kvpact.evaluate.feed import chunks, first_tokens, forward
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers.versions import named

DEFAULT = "trellis:bits=4"
CHUNK, STEPS = 256, 40


def kl(model: Any, ids: Tensor, spec: str) -> tuple[float, float]:
    """Return the KL with layers of full attention packed, and with all of them."""
    found = []
    for made in (None, {}, {"sliding": spec}):
        cache = DynamicCache(config=model.config)
        if made is not None:
            cache = CompressedCache(model, spec, **made)
        logits = [forward(model, part, cache).float() for _, part, _ in chunks(ids, CHUNK)]
        found.append(torch.cat(logits[1:]).log_softmax(-1))
    exact, one, other = found
    means = [(exact.exp() * (exact - x)).sum(-1).mean().item() for x in (one, other)]
    return means[0], means[1]


def nbytes(model: Any, ids: Tensor, tokens: int) -> list[int]:
    """Return the bytes of a cache of so many tokens, sliding layers exact and packed."""
    made = [CompressedCache(model, DEFAULT), CompressedCache(model, DEFAULT, sliding=DEFAULT)]
    for cache in made:
        for part in ids[:tokens].split(512):
            model(part[None], **named(cache), logits_to_keep=1)
    return [cache.nbytes for cache in made]


def steps(model: Any, ids: Tensor, lengths: list[int]) -> None:
    """Print the time of a step at each length."""
    caches = {
        "exact": DynamicCache(config=model.config),
        "default": CompressedCache(model, DEFAULT),
        "sliding=": CompressedCache(model, DEFAULT, sliding=DEFAULT),
    }
    print(f"\n{'tokens':>8}" + "".join(f"{name + ', ms':>14}" for name in caches))
    held = 0
    for tokens in lengths:
        for cache in caches.values():
            for part in ids[held:tokens].split(512):
                model(part[None], **named(cache), logits_to_keep=1)
        held = tokens
        times: dict[str, list[float]] = {name: [] for name in caches}
        copies = copy.deepcopy(caches)
        for token in ids[tokens : tokens + STEPS]:
            for name, cache in copies.items():
                begin = time.perf_counter()
                model(token.view(1, 1), **named(cache))
                times[name].append(time.perf_counter() - begin)
        medians = [statistics.median(found[4:]) for found in times.values()]
        print(f"{tokens:>8}" + "".join(f"{1e3 * x:14.2f}" for x in medians), flush=True)


@torch.no_grad()
def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--scored", type=int, default=1408)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    most = max(*options.tokens, options.scored) + STEPS
    ids = first_tokens(tokenizer, book_path().read_text("utf-8"), most)
    print(f"{options.model}, KL over {options.scored} tokens")
    print(f"{'spec':18}{'sliding exact':>15}{'packed':>12}")
    for spec in ("int:bits=8", DEFAULT):
        one, other = kl(model, ids[: options.scored], spec)
        print(f"{spec:18}{one:15.1e}{other:12.1e}", flush=True)
    steps(model, ids, options.tokens)
    print(f"\n{'tokens':>8}{'default, MB':>14}{'sliding=, MB':>14}{'share':>8}")
    model = model.to(torch.bfloat16)
    for tokens in options.tokens:
        one, other = nbytes(model, ids, tokens)
        print(f"{tokens:>8}{one / 1e6:14.2f}{other / 1e6:14.2f}{other / one:8.2f}", flush=True)


if __name__ == "__main__":
    main()
