"""Counts the Python calls in kvpact that one layer costs: what a fast computer can't make cheaper.

    python benchmarks/calls.py [--spec trellis:bits=4 turboquant:bits=4] [--functions] [--out DIR]

Counted by `sys.setprofile` are calls of functions whose code is in the kvpact package, each for one
layer of a cache that is used as an engine uses it: a prompt of 200 tokens, the first two steps after
it, and a later step (the 65th). ``bare`` is `attend` of a `ContiguousCache`; ``transformers`` a
forward pass of a tiny random Llama with a `CompressedCache`. ``--functions`` prints what is called
in a later step, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpact
from kvpact import CacheGeometry, create_cache
from kvpact.integrations.transformers import CompressedCache

SPECS = ("trellis:bits=4", "turboquant:bits=4")
LAYERS = 4
PROMPT = 200
STEPS = {"step 1": 1, "step 2": 2, "later step": 65}
"""Names of the steps that are shown, and which after the prompt they are."""
PACKAGE = str(Path(kvpact.__file__).parent)
Call = Callable[[int], object]


def calls_of(call: Callable[[], object]) -> Counter[str]:
    """Return how often each function of kvpact is called, by file and name."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def bare(spec: str) -> Call:
    """Return what gives every layer of a new cache so many tokens."""
    cache = create_cache(spec, CacheGeometry(LAYERS, 2, 64, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)

    def run(tokens: int) -> None:
        for layer in range(LAYERS):
            k, v = (torch.randn(1, 2, tokens, 64, generator=generator) for _ in "kv")
            cache.attend(layer, k, v, torch.randn(1, 4, tokens, 64, generator=generator))

    return run


def in_model(spec: str) -> Call:
    """Return what gives a tiny Llama with a new cache so many tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=LAYERS)).eval()
    cache = CompressedCache(model, spec)
    return lambda tokens: model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)


WAYS: dict[str, Callable[[str], Call]] = {"bare": bare, "transformers": in_model}


def measure(way: str, spec: str) -> dict[str, Counter[str]]:
    """Return what is called in the prompt and in the steps that are shown."""
    with torch.no_grad():
        WAYS[way](spec)(PROMPT)  # what is made once for a process is there
        run = WAYS[way](spec)
        found = {"prompt": calls_of(lambda: run(PROMPT))}
        names = {number: name for name, number in STEPS.items()}
        for number in range(1, max(names) + 1):
            calls = calls_of(lambda: run(1))
            if number in names:
                found[names[number]] = calls
    return found


def main() -> None:
    """Count, print, and write DIR/calls.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", nargs="*", default=SPECS)
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = {f"{way}, {spec}": measure(way, spec) for spec in options.spec for way in WAYS}
    print(f"{'Python calls in kvpact per layer':36}" + "".join(f"{x:>12}" for x in ["prompt", *STEPS]))
    for name, found in rows.items():
        print(f"{name:36}" + "".join(f"{x.total() / LAYERS:12.1f}" for x in found.values()))
        for function, calls in found["later step"].most_common() if options.functions else ():
            print(f"    {calls / LAYERS:8.2f}  {function}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        numbers = {
            name: {part: calls.total() / LAYERS for part, calls in found.items()}
            for name, found in rows.items()
        }
        (options.out / "calls.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
