"""Counts the Python calls in kvpact that one layer costs: what a fast computer can't make cheaper.

    python benchmarks/calls.py [--spec trellis:bits=4 turboquant:bits=4] [--out DIR]

Counted by `sys.setprofile` are calls of functions whose code is in the kvpact package, in a prompt
of 200 tokens, the first two steps after it, and a later step (the median of the 49th to the 80th),
divided by the 16 layers.
``bare`` is `attend` of a `ContiguousCache`; ``transformers`` a forward pass of a tiny random Llama
with a `CompressedCache`. At the end stand what each further row of a batch costs a layer of vLLM's
in a step, and the milliseconds that a second cache for the same model takes to make, and the first.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import runner
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpact
from kvpact import AttendConfig, CacheGeometry, create_cache, parse_spec
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.page import PageForm
from kvpact.integrations.pages.window import Row, WindowPool
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named
from kvpact.integrations.vllm.setting import codecs, native_plan

SPECS = ["trellis:bits=4", "turboquant:bits=4"]
LAYERS, PROMPT, MADE, ROWS = 16, 200, 50, 9
STEPS = {"step 1": (1, 1), "step 2": (2, 2), "later step": (49, 80)}
"""Names of the steps that are shown, and which after the prompt they are: of several the median."""
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

    def run(tokens: int) -> None:
        for layer in range(LAYERS):
            k, v, q = torch.randn(8, tokens, 64)[None].split([2, 2, 4], 1)
            cache.attend(layer, k=k, v=v, q=q)

    return run


def tiny() -> LlamaForCausalLM:
    """Return a random Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=LAYERS)).eval()


def in_model(spec: str) -> Call:
    """Return what gives a tiny Llama with a new cache so many tokens."""
    model = tiny()
    cache = CompressedCache(model, spec)
    return lambda tokens: model(torch.ones(1, tokens, dtype=torch.long), **named(cache))


WAYS: dict[str, Callable[[str], Call]] = {"bare": bare, "transformers": in_model}


def measure(way: str, spec: str) -> dict[str, Counter[str]]:
    """Return what is called in the prompt and in the steps that are shown."""
    with torch.no_grad():
        WAYS[way](spec)(PROMPT)  # what is made once for a process is there
        run = WAYS[way](spec)
        found = {"prompt": calls_of(lambda: run(PROMPT))}
        steps = [calls_of(lambda: run(1)) for _ in range(max(STEPS.values())[1])]
    for name, (first, last) in STEPS.items():
        found[name] = sorted(steps[first - 1 : last], key=Counter.total)[(last - first) // 2]
    return found


def a_row_in_vllm() -> float:
    """Return the calls that a step of a layer over vLLM's pages takes for each further row."""
    spec = parse_spec("turboquant:bits=4,sinks=0,window=64")
    dtype, tokens, found = torch.bfloat16, 32, []
    k, v = codecs(spec, 64, 64, dtype)
    form = PageForm(k, v, tokens)
    for count in (1, ROWS):
        pages = torch.zeros(4 * count, 2, tokens, form.content, dtype=torch.uint8)
        windows = WindowPool(64, count, tokens, ((2, 64), (2, 64)), dtype)
        layer, held = PagedLayer(form, native_plan(k, v, dtype), pages, windows), 0
        for new in (70, 1, 1, 1):
            ends, pages_used = held + new, (held + new + 31) // 32
            rows = [
                Row(i * new, (i + 1) * new, held, tuple(range(4 * i, 4 * i + pages_used)))
                for i in range(count)
            ]
            q, kv = torch.randn(count * new, 4, 64).to(dtype), torch.randn(count * new, 2, 64)
            given = (q, kv.to(dtype), kv.to(dtype), torch.empty_like(q), AttendConfig())
            calls, held = calls_of(partial(layer.step, rows, *given)), ends
        found.append(calls.total())
    return (found[1] - found[0]) / (ROWS - 1)


def main() -> None:
    options = runner.arguments(__doc__, spec=SPECS)
    turn = runner.turn_of(partial(CompressedCache, tiny()))
    first, *others = (turn() * 1000 for _ in range(MADE))
    next_one = runner.quartiles(others)[1]
    found = {f"{way}, {spec}": measure(way, spec) for spec in options.spec for way in WAYS}
    numbers = {
        name: {part: calls.total() / LAYERS for part, calls in parts.items()}
        for name, parts in found.items()
    }
    cells = [[name, *(f"{x:.1f}" for x in row.values())] for name, row in numbers.items()]
    body = [runner.table(["Python calls in kvpact per layer", "prompt", *STEPS], cells), ""]
    row = a_row_in_vllm()
    body += [f"each further row of a step in vLLM: {row:.1f} calls", ""]
    body += [f"making a cache: {first:.2f} ms, then {next_one:.2f} ms"]
    numbers["a further row in vLLM"] = {"later step": row}
    numbers["making a cache, ms"] = {"first": first, "next": next_one}
    runner.report(options, "calls", numbers, body)


if __name__ == "__main__":
    main()
