"""Continuous batching: 16 prompts of unlike length on one pool of compressed pages.

The pool is too small for all of them at once. A prompt is admitted when its pages are there; when
the running ones need more than is left, the youngest gives its pages back and waits, and is
computed again from its prompt and what it had generated.

    python examples/continuous_batching.py --spec turboquant:bits=4 --pages 36
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

import kvpact
from kvpact import PagedKVCache
from kvpact.data import book_path
from kvpact.errors import CacheFull
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import PagedBatch
from kvpact.integrations.transformers.versions import named


@dataclass
class Request:
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    seq: int = -1


@dataclass
class Report:
    outputs: list[list[int]]
    steps: int = 0
    largest_batch: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    seconds: float = 0.0


def paged_cache(model: Any, spec: str, pages: int) -> PagedKVCache:
    """Return a pool of pages in the shape of a model."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    geometry = kvpact.CacheGeometry(
        config.num_hidden_layers, config.num_key_value_heads, head_dim, dtype=model.dtype
    )
    return PagedKVCache(spec, geometry, pages)


@torch.no_grad()
def forward(model: Any, cache: PagedKVCache, seqs: list[int], tokens: list[list[int]]) -> list[int]:
    """Run the next tokens of sequences (as many of each); return the greedy choice of each."""
    positions = [
        list(range(cache.seq_len(seq), cache.seq_len(seq) + len(row)))
        for seq, row in zip(seqs, tokens, strict=True)
    ]
    output = model(
        torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        logits_to_keep=1,
        **named(PagedBatch(model.config, cache, seqs)),
    )
    return output.logits[:, -1].argmax(-1).tolist()


def serve(model: Any, cache: PagedKVCache, prompts: list[list[int]], new_tokens: int) -> Report:
    """Generate `new_tokens` for every prompt; raise `CacheFull` if one alone is too long."""
    requests = [Request(list(prompt)) for prompt in prompts]
    waiting, running = deque(requests), list[Request]()  # both in the order of arrival
    report, start = Report([request.generated for request in requests]), time.perf_counter()

    def leave(request: Request) -> None:
        running.remove(request)
        cache.free(request.seq)

    while waiting or running:
        # The running ones first: who is admitted now must not take what they need for this step.
        while not make_room(cache, running):
            youngest = running[-1]
            leave(youngest)
            waiting.appendleft(youngest)
            report.preemptions += 1
        while waiting and admit(model, cache, waiting[0], alone=not running):
            running.append(waiting.popleft())
            report.peak_pages = max(report.peak_pages, cache.num_pages - cache.num_free_pages)
            if len(running[-1].generated) == new_tokens:
                leave(running[-1])
        if not running:
            continue
        report.peak_pages = max(report.peak_pages, cache.num_pages - cache.num_free_pages)
        seqs, last = [r.seq for r in running], [r.generated[-1:] for r in running]
        for request, token in zip(list(running), forward(model, cache, seqs, last), strict=True):
            request.generated.append(token)
            if len(request.generated) == new_tokens:
                leave(request)
        report.steps += 1
        report.largest_batch = max(report.largest_batch, len(seqs))
    report.seconds = time.perf_counter() - start
    return report


def make_room(cache: PagedKVCache, running: list[Request]) -> bool:
    """Take the pages of the next step; False if someone has to go first."""
    try:
        cache.reserve([request.seq for request in running], 1)
    except CacheFull:
        if len(running) == 1:
            raise
        return False
    return True


def admit(model: Any, cache: PagedKVCache, request: Request, *, alone: bool) -> bool:
    """Prefill a request if there are pages for it and its next token."""
    tokens = request.prompt + request.generated
    request.seq = cache.allocate()
    try:
        cache.reserve([request.seq], len(tokens) + 1)
    except CacheFull:
        cache.free(request.seq)
        if alone:
            raise
        return False
    request.generated += forward(model, cache, [request.seq], [tokens])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="turboquant:bits=4")
    parser.add_argument("--pages", type=int, default=36, help="pages of the pool")
    parser.add_argument("--new-tokens", type=int, default=32, help="for every prompt")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    book = book_path().read_text("utf-8")
    # 40 to 640 characters, long and short ones mixed.
    texts = [book[i * 3000 : i * 3000 + 40 * (1 + 5 * i % 16)] for i in range(16)]
    prompts = [tokenizer(text).input_ids for text in texts]
    cache = paged_cache(model, options.spec, options.pages)
    report = serve(model, cache, prompts, options.new_tokens)
    assert cache.num_free_pages == cache.num_pages, "a page was lost"

    lengths = sorted(len(prompt) for prompt in prompts)
    pages = -(-(torch.tensor(lengths) + options.new_tokens) // cache.pool.page_size)
    rows = {
        "spec": kvpact.parse_spec(options.spec),
        "prompts": f"{len(prompts)}, {lengths[0]} to {lengths[-1]} tokens",
        "pages": f"{cache.num_pages} of {cache.pool.page_size} tokens",
        "pages for all at once": int(pages.sum()),
        "peak pages": report.peak_pages,
        "decode steps": report.steps,
        "largest batch": report.largest_batch,
        "preemptions": report.preemptions,
        "new tokens/s": f"{sum(map(len, report.outputs)) / report.seconds:.1f}",
        "free pages at the end": cache.num_free_pages,
    }
    for name, value in rows.items():
        print(f"{name:24}{value}")


if __name__ == "__main__":
    main()
