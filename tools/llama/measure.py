"""Times of a binding of llama.cpp for Python and what it finds likely, as JSON.

    python measure.py BINDING MODEL TEXT PROMPT STEPS PLACES OUT [--kvpact]

BINDING is ``xllamacpp``, ``llama_cpp`` or ``llama_cpp_py_sync``. Each token is given, not
generated, so that both sides compute the same.
"""

from __future__ import annotations

import ctypes
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

Step = Callable[[int, int, bool], list[float]]
"""Evaluates tokens from one place to another; returns probabilities of the next one if asked."""


def xllamacpp(package: Any, model: str, text: str, room: int) -> Step:
    """Return a step by the server in this process."""
    params = package.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = room, 512, 512, 1
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

    def step(begin: int, end: int, likely: bool) -> list[float]:
        asked = {"prompt": tokens[:end], "n_predict": 1, "temperature": 0, "cache_prompt": True}
        found = server.handle_completions(asked | {"n_probs": 49_152 * likely})
        assert found["timings"]["prompt_n"] == end - begin, found["timings"]
        if not likely:
            return []
        (told,) = found["choices"][0]["logprobs"]["content"]
        return [exp(x["logprob"]) for x in sorted(told["top_logprobs"], key=lambda x: x["id"])]

    return step


def llama_cpp(package: Any, model: str, text: str, room: int) -> Step:
    """Return a step by llama-cpp-python, with its own libraries or those of a build's programs."""
    if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):
        ggml = ctypes.CDLL(f"{folder}/libggml.so")
        if not ggml.ggml_backend_reg_count():  # backends are dynamic
            ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    llama = package.Llama(
        model, n_ctx=room, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1,
        flash_attn=True, type_k=8, type_v=8, verbose=False,
    )  # fmt: skip
    tokens = llama.tokenize(text.encode())

    def step(begin: int, end: int, likely: bool) -> list[float]:
        llama.eval(tokens[begin:end])
        logits = package.llama_get_logits_ith(llama.ctx, -1)
        return [exp(x) for x in logits[: llama.n_vocab()]] if likely else []

    return step


def llama_cpp_py_sync(package: Any, model: str, text: str, room: int) -> Step:
    """Return a step by llama.cpp's own functions."""
    bindings = import_module("llama_cpp_py_sync._cffi_bindings")
    lib, ffi = bindings.get_lib(), bindings.get_ffi()
    lib.llama_backend_init()
    given = lib.llama_model_default_params()
    given.n_gpu_layers = 0
    loaded = lib.llama_model_load_from_file(model.encode(), given)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = room, 512, 512
    params.n_threads = params.n_threads_batch = params.flash_attn_type = 1
    params.type_k = params.type_v = 8
    context = lib.llama_init_from_model(loaded, params)
    vocabulary, raw = lib.llama_model_get_vocab(loaded), text.encode()
    tokens = ffi.new("int32_t[]", len(raw))
    lib.llama_tokenize(vocabulary, raw, len(raw), tokens, len(raw), True, False)
    size = lib.llama_vocab_n_tokens(vocabulary)

    def step(begin: int, end: int, likely: bool) -> list[float]:
        for i in range(begin, end, 512):
            count = min(end - i, 512)
            assert lib.llama_decode(context, lib.llama_batch_get_one(tokens + i, count)) == 0
        logits = lib.llama_get_logits_ith(context, -1)
        return [exp(x) for x in ffi.unpack(logits, size)] if likely else []

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
    end = prompt + steps + places
    read = Path(text).read_text("utf-8")[: 8 * end]
    step: Step = globals()[binding](package, model, read, end + 64)

    def timed(begin: int, end: int) -> float:
        """Return milliseconds of the processor, which other programs do not prolong."""
        before = time.process_time()
        step(begin, end, False)
        return (time.process_time() - before) * 1e3

    found: dict[str, Any] = {"prompt": timed(0, prompt) / prompt}
    found["steps"] = [timed(i, i + 1) for i in range(prompt, prompt + steps)]
    found["likely"] = [step(i, i + 1, True) for i in range(prompt + steps, end)]
    found["attentions"] = enabled.attentions if enabled else 0
    Path(out).write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # some servers wait for threads at their end


if __name__ == "__main__":
    main()
