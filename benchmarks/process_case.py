"""One generation of `process.py`, in a process of its own: what the kernel counts, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from leaderboard_bytes import held_bytes
from leaderboard_contenders import contender
from resident import peak_over, peak_start, resident
from transformers import Cache, DynamicCache, PreTrainedModel

from kvpact.data import book_path
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named


def made(spec: str, model: PreTrainedModel) -> Cache:
    """Return an empty cache: of a spec of kvpact's, or the cache NAME of a PEER as "PEER: NAME"."""
    if spec == "DynamicCache":
        return DynamicCache(config=model.config)
    peer, other, name = spec.partition(": ")
    return contender(peer).caches[name](model) if other else CompressedCache(model, spec)


def measure(
    model: str, dtype: str, threads: int, tokens: int, chunk: int, spec: str, steps: int
) -> dict[str, int]:
    """Return bytes: of the cache, and at the peak and afterwards of the process over the start."""
    torch.set_num_threads(threads)
    network, tokenizer = load_model(model, dtype=getattr(torch, dtype))
    text = book_path().read_text("utf-8")
    ids = tokenizer(text * 2, return_tensors="pt")["input_ids"][:, :tokens]
    greedy = {"do_sample": False, "pad_token_id": 0}
    network.generate(ids[:, :64], max_new_tokens=2, **greedy)  # libraries load, threads start
    cache = made(spec, network)
    given = {"prefill_chunk_size": chunk} if chunk else {}
    before = peak_start()
    network.generate(
        ids, **named(cache), min_new_tokens=steps, max_new_tokens=steps, **greedy, **given
    )
    peak = peak_over(before)
    return {"cache": held_bytes(cache), "peak": peak, "after": resident() - before}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
