"""The native kernel for many query rows against the torch bodies; a script for SIMD levels."""

from __future__ import annotations

import json
from typing import Any

import torch
from compare import FORMATS, both, check_guards, error, guarded_output, random_tokens

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.cpu import attend as native

LATENT_FORMATS = ("turboquant:bits=4", "turboquant:bits=3/fp8", "int:bits=8", "kivi:bits=4", "none")


def latents(
    spec: str,
    *,
    q_heads: int = 16,
    rank: int = 512,
    rope: int = 64,
    held: int = 300,
    new: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layout: str = "contiguous",
    backend: str = "cpu",
    **config: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Return the torch body's output over latents, the native one, and the calls' ways."""
    results = []
    for name in ("torch", backend):
        generator = torch.Generator().manual_seed(seed)
        geometry = CacheGeometry.mla(1, rank, rope, dtype)
        pages = {"num_pages": batch * (-(-(held + new) // 128) + 1), "page_size": 128}
        options = pages if layout == "paged" else {}
        cache = create_cache(spec, geometry, layout, backend=name, **options)
        rules = {"softmax_scale": 0.07, **config}
        padding = {key: config[key] for key in ("padding",) if key in config}

        def tokens(
            count: int, generator: torch.Generator = generator
        ) -> tuple[torch.Tensor, torch.Tensor]:
            c_kv = random_tokens(generator, batch, 1, count, rank, dtype=dtype)
            return c_kv, random_tokens(generator, batch, 1, count, rope, dtype=dtype)

        if held:
            cache.prefill(0, *tokens(held), config=AttendConfig(**padding))
        c_kv, k_rope = tokens(new)
        q = random_tokens(generator, batch, q_heads, new, rank + rope, dtype=dtype)
        results.append(cache.attend(0, c_kv, k_rope, q, AttendConfig(**rules)).float())
    return results[0], results[1], cache.stats()["compute"]["attend"]


def main() -> None:
    """Run all formats and some shapes at the level of this process; print a JSON line."""
    from kvpact.kernels.cpu import library

    native.new_output = guarded_output
    native.MANY_ROWS = 1
    cases: list[dict[str, Any]] = [{"spec": spec, "new": 17} for spec in FORMATS]
    for dim in (36, 80, 96, 128, 256, 576):
        specs = ("turboquant:bits=3", "int:bits=8", "kivi:bits=4,group=64", "fp8")
        cases += [{"spec": spec, "dim": dim, "new": 7} for spec in specs]
    for groups in (1, 2, 4, 5, 8):
        shape = {"groups": groups, "held": 97 + groups, "new": 33}
        cases += [{"spec": "turboquant:bits=4", **shape}]
    cases += [{"spec": "kvarn:bits=4", "new": 130, "sliding_window": 70, "softcap": 3.0}]
    found = [(case, both(**case)) for case in cases]
    for spec in LATENT_FORMATS:
        for shape in ({}, {"new": 17, "held": 45}, {"q_heads": 3, "rank": 40, "rope": 8}):
            found.append(({"spec": spec, **shape}, latents(spec, **shape)))
            check_guards()
    worst = 0.0
    for case, (expected, output, calls) in found:
        assert calls == {"cpu": 1}, (case, calls)
        worst = max(worst, error(expected, output))
        assert torch.isfinite(output).all(), case
    print(json.dumps({"level": library().level, "cases": len(found), "worst": worst}))


if __name__ == "__main__":
    main()
