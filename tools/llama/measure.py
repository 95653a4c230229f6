"""Times of a binding of llama.cpp for Python and what it finds likely, as JSON.

    python measure.py BINDING MODEL TEXT PROMPT STEPS PLACES OUT [--kvpact]

BINDING is ``xllamacpp`` or ``llama_cpp_py_sync``. Each token is given, not generated, so that both
sides compute the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from math import exp
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

Step = Callable[[int, int], tuple[float, list[float]]]
"""Evaluates tokens from one place to another: milliseconds, and probabilities of the next one."""


def xllamacpp(package: Any, model: str, text: str) -> Step:
    """Return a step by the server in this process."""
    params = package.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 4096, 512, 512, 1
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = package.ggml_type.GGML_TYPE_Q8_0
    params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = package.Server(params)
    asked = Request(
        f"{server.listening_address}/tokenize", json.dumps({"content": text}).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urlopen(asked) as told:
        tokens = json.load(told)["tokens"]

    def step(begin: int, end: int) -> tuple[float, list[float]]:
        found = server.handle_completions(
            {"prompt": tokens[:end], "n_predict": 1, "n_probs": 49_152, "temperature": 0,
             "cache_prompt": True}
        )  # fmt: skip
        times = found["timings"]
        assert times["prompt_n"] == end - begin, times
        likely = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return times["prompt_ms"], [
            exp(x["logprob"]) for x in sorted(likely, key=lambda x: x["id"])
        ]

    return step


def llama_cpp_py_sync(package: Any, model: str, text: str) -> Step:
    """Return a step by llama.cpp's own functions."""
    bindings = import_module("llama_cpp_py_sync._cffi_bindings")
    lib, ffi = bindings.get_lib(), bindings.get_ffi()
    lib.llama_backend_init()
    given = lib.llama_model_default_params()
    given.n_gpu_layers = 0
    loaded = lib.llama_model_load_from_file(model.encode(), given)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 4096, 512, 512
    params.n_threads = params.n_threads_batch = params.flash_attn_type = 1
    params.type_k = params.type_v = 8
    context = lib.llama_init_from_model(loaded, params)
    vocabulary, raw, room = lib.llama_model_get_vocab(loaded), text.encode(), 8000
    tokens = ffi.new("int32_t[]", room)
    lib.llama_tokenize(vocabulary, raw, len(raw), tokens, room, True, False)
    size = lib.llama_vocab_n_tokens(vocabulary)

    def step(begin: int, end: int) -> tuple[float, list[float]]:
        start = time.perf_counter()
        for i in range(begin, end, 512):
            count = min(end - i, 512)
            assert lib.llama_decode(context, lib.llama_batch_get_one(tokens + i, count)) == 0
        ms = (time.perf_counter() - start) * 1e3
        logits = [exp(x) for x in ffi.unpack(lib.llama_get_logits_ith(context, -1), size)]
        return ms, [x / sum_ for sum_ in [sum(logits)] for x in logits]

    return step


def main() -> None:
    """Measure, and write what was found."""
    binding, model, text, *counts, out = sys.argv[1:8]
    prompt, steps, places = map(int, counts)
    package = import_module(binding)
    if binding == "llama_cpp_py_sync":  # it opens its libraries when they are first wanted
        import_module("llama_cpp_py_sync._cffi_bindings").get_lib()
    enabled = None
    if "--kvpact" in sys.argv:
        from kvpact.integrations.llama_cpp import enable

        enabled = enable()
    step: Step = globals()[binding](package, model, Path(text).read_text("utf-8")[:20_000])
    found: dict[str, Any] = {"prompt": step(0, prompt)[0] / prompt}
    done = [step(i, i + 1) for i in range(prompt, prompt + steps + places)]
    found["steps"] = [ms for ms, _ in done[:steps]]
    found["likely"] = [likely for _, likely in done[steps:]]
    found["attentions"] = enabled.attentions if enabled else 0
    Path(out).write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # some servers wait for threads at their end


if __name__ == "__main__":
    main()
