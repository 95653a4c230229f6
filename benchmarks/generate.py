"""Tokens per second of a real model on a long context: compressed caches beside transformers' own.

    python benchmarks/generate.py [--tokens 6000] [--steps 12] [--threads 1] [--model smollm2]

The text goes through the model once, in chunks, into transformers' `DynamicCache`; every other
cache is filled with the same keys and values. Then all caches take turns, a greedy token each, and
medians and ratios are printed. `QuantizedCache` (4 bits) is measured where optimum-quanto is
installed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from pathlib import Path

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

import kvpact
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache

TEXT = Path(kvpact.__file__).parent / "data" / "northanger_abbey.txt"
SPECS = ("turboquant:bits=4", "turboquant:bits=3", "int:bits=8")


def context(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """Return an exact cache of the tokens."""
    cache = DynamicCache(config=model.config)
    for start in range(0, ids.shape[1], 512):
        model(ids[:, start : start + 512], past_key_values=cache, logits_to_keep=1)
        print(f"\rprefill {min(start + 512, ids.shape[1])} of {ids.shape[1]}", end="", flush=True)
    print()
    return cache


def filled(cache: Cache, exact: DynamicCache) -> Cache:
    """Store what an exact cache holds in another one."""
    for index, layer in enumerate(exact.layers):
        cache.update(layer.keys, layer.values, index)
    if isinstance(cache, CompressedCache):
        cache.memory_usage()  # stores what waits for its first use
    return cache


def held_bytes(cache: Cache) -> float:
    """Return the bytes of a cache, NaN where it does not tell."""
    if isinstance(cache, CompressedCache):
        return cache.memory_usage()
    if isinstance(cache, QuantizedCache):
        return float("nan")
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    caches: dict[str, tuple[PreTrainedModel, Cache]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load_model(options.model, dtype=dtype)
        ids = tokenizer(TEXT.read_text("utf-8"), return_tensors="pt").input_ids
        if not caches:
            exact = context(model, ids[:, : options.tokens])
        else:
            exact = copy.deepcopy(exact)
            for layer in exact.layers:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
        name = str(dtype).removeprefix("torch.")
        caches[f"DynamicCache, {name}"] = model, exact
        for spec in SPECS if dtype == torch.float32 else SPECS[:1]:
            caches[f"{spec}, {name}"] = model, filled(CompressedCache(model.config, spec), exact)
        if dtype == torch.float32 and importlib.util.find_spec("optimum"):
            quantised = QuantizedCache("quanto", model.config, nbits=4)
            caches["QuantizedCache, quanto 4 bits"] = model, filled(quantised, exact)
    times: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.tensor([[5]])
    for _ in range(options.steps + 1):
        for name, (model, cache) in caches.items():
            start = time.perf_counter()
            model(token, past_key_values=cache)
            times[name].append(time.perf_counter() - start)
    print(f"{options.tokens} tokens, {options.threads} thread(s), torch {torch.__version__}")
    print(f"{'':34}{'ms a token':>11}{'quartiles':>16}{'x fp32':>8}{'MB':>8}{'of fp32':>9}")
    base = next(iter(caches))
    whole = held_bytes(caches[base][1])
    for name, (_, cache) in caches.items():
        low, middle, high = (x * 1e3 for x in statistics.quantiles(times[name][1:], n=4))
        ratio = statistics.median(times[base][1:]) * 1e3 / middle
        size = held_bytes(cache)
        print(
            f"{name:34}{middle:11.1f}{f'{low:.1f}-{high:.1f}':>16}{ratio:8.2f}"
            f"{size / 1e6:8.1f}{size / whole:9.3f}"
        )


if __name__ == "__main__":
    main()
