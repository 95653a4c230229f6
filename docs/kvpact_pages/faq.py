"""What ``faq.md`` and ``which-when.md`` take from real caches and committed results."""

from __future__ import annotations

import torch

import kvpact
from kvpact.cache import ContiguousCache
from kvpact_pages.quality import coverage
from kvpact_pages.results import code, load, table

CONTEXTS = (128, 256, 1024, 4096, 32768)
SPECS = ("int:bits=8", "turboquant:bits=4", "trellis:bits=4", "trellis:bits=3")


def share(spec: str, count: int) -> float:
    """Return the bytes that a cache holds for so many bf16 tokens, over theirs."""
    cache = kvpact.create_cache(spec, kvpact.CacheGeometry(1, 1, 128))
    assert isinstance(cache, ContiguousCache)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, count, 128, generator=generator).to(torch.bfloat16)
    cache.store(0, k=x, v=x)
    return cache.memory_usage() / (2 * x.nbytes)


def contexts() -> str:
    """Return the bytes of several specs at several contexts."""
    rows = [[code(spec), *(f"{share(spec, count):.2f}" for count in CONTEXTS)] for spec in SPECS]
    return table(("share of bf16's bytes", *(f"{count:,}" for count in CONTEXTS)), rows)


def ranks() -> str:
    """Return the KL of specs of 3 to 3.75 bits on both models, and their ranks."""
    specs = ["trellis:bits=3", "kvarn:bits=3", "int:bits=3,rotate=true"]
    specs += ["turboquant:bits=3", "int:bits=3", "kivi:bits=2"]
    columns: list[list[str]] = [list(map(code, specs))]
    for model in ("smollm2", "gemma3"):
        found = {r["spec"]: r["kl_mean"] for r in load(f"models/{model}/eval.json")}
        order = sorted(specs, key=found.__getitem__)
        columns.append([f"{found[spec]:.5f} (rank {order.index(spec) + 1})" for spec in specs])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return table(("mean KL", "SmolLM2-135M", "Gemma 3 270M"), rows)


def generated() -> str:
    """Return what generating on three caches took, on one thread."""
    names = {
        "DynamicCache, fp32": "`DynamicCache`",
        "QuantizedCache, fp32": "`QuantizedCache` (quanto)",
        "turboquant:bits=4, fp32": "kvpact, `turboquant:bits=4`",
    }
    found = {r["candidate"]: r for r in load("generate/generate.json")["rows"] if r["threads"] == 1}
    rows = [
        [said, f"{found[name]['ms']:.0f}", f"{found[name]['cache'] / 1e6:.0f}"]
        for name, said in names.items()
    ]
    return table(("SmolLM2-135M, fp32, one thread", "ms a token", "MB"), rows)


WHICH = {"which-generate": generated}
BLOCKS = {"faq-contexts": contexts, "faq-coverage": coverage, "faq-ranks": ranks}
