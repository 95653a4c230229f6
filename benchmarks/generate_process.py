"""One cache of `generate.py`, with a model of its own, in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from resident import peak_over, peak_start, resident
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKEN = torch.tensor([[5]])
CHUNK = 512


@dataclass(frozen=True)
class Candidate:
    """A cache and the model's dtype; `spec` is kvpact's, or a class of transformers."""

    spec: str
    dtype: str

    @property
    def name(self) -> str:
        """Return the name in the tables."""
        return f"{self.spec}, {self.dtype}"

    def make(self, model: PreTrainedModel) -> Cache:
        """Return an empty cache."""
        if self.spec == "DynamicCache":
            return DynamicCache(config=model.config)
        if self.spec == "QuantizedCache":
            return QuantizedCache("quanto", model.config, nbits=4)
        return CompressedCache(model.config, self.spec)


def prefill(model_name: str, text: str, tokens: int, path: Path, threads: int) -> None:
    """Write the keys and values of a text's first tokens, fp32, to a file."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(model_name)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, fewer than {tokens}")
    cache = DynamicCache(config=model.config)
    for start in range(0, tokens, CHUNK):
        model(ids[:, start : start + CHUNK], **named(cache), logits_to_keep=1)
    found = {f"k{i}": layer.keys.contiguous() for i, layer in enumerate(cache.layers)}
    save_file(found | {f"v{i}": x.values.contiguous() for i, x in enumerate(cache.layers)}, path)


def fill(cache: Cache, path: Path, dtype: torch.dtype) -> None:
    """Store what the file holds, layer by layer, and let the model's copies go."""
    with safe_open(path, framework="pt") as file:
        for index in range(len(file.keys()) // 2):
            pair = (file.get_tensor(f"{side}{index}").to(dtype, copy=True) for side in "kv")
            cache.update(*pair, index)
            if isinstance(cache, CompressedCache):
                cache.memory_usage()  # stores what waits for its first use


def held_bytes(cache: Cache) -> int:
    """Return the bytes of a cache's tensors."""
    if isinstance(cache, CompressedCache):
        return cache.memory_usage()
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    found = (getattr(layer, name, None) for layer in cache.layers for name in names)
    return sum(tensor_bytes(tensor) for tensor in found if tensor is not None)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, of a quantised one those of its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(tensor_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def serve(pipe: Connection, model_name: str, candidate: Candidate, path: Path) -> None:
    """Fill the cache, tell its size, then do what is asked: set threads, a step, a step's peak."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = DTYPES[candidate.dtype]
    model, _ = load_model(model_name, dtype=dtype)
    warm = candidate.make(model)
    for _ in range(3):  # libraries make room for themselves, and quanto compiles
        model(TOKEN, **named(warm))
    del warm
    before = resident()
    cache = candidate.make(model)
    fill(cache, path, dtype)
    sizes = {"cache": held_bytes(cache), "before": before, "after": resident()}

    def step() -> float:
        start = time.perf_counter()
        model(TOKEN, **named(cache))
        return time.perf_counter() - start

    def peak() -> int:
        step()  # what is made once is there
        found = []
        for _ in range(3):
            start = peak_start()
            step()
            found.append(peak_over(start))
        return statistics.median(found)

    asked: dict[str, Callable[[], object]] = {"step": step, "peak": peak}
    pipe.send(sizes)
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        if isinstance(what, int):
            torch.set_num_threads(what)
        else:
            pipe.send(asked[what]())
