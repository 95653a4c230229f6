"""The native kernel against the torch body, on the same tokens; a script for other SIMD levels."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.cpu import attend as native
from kvpact.testing import random_offset

FORMATS = (
    *(f"turboquant:bits={bits}" for bits in range(1, 9)),
    "turboquant:bits=4,center=64",
    "turboquant:bits=3,center=128,scale=unbiased",
    *(f"int:bits={bits}" for bits in (2, 3, 4, 5, 6, 7, 8)),
    "int:bits=4,zero=true",
    "int:bits=8,zero=true,group=64",
    "int:bits=4,group=64,rotate=true",
    "int:bits=3,zero=true,rotate=true/int:bits=8,rotate=true",
    "kivi:bits=2",
    "kivi:bits=4,group=64",
    "kivi:bits=3,group=128",
    "kivi:bits=8,group=32",
    "kvarn:bits=4",
    "kvarn:bits=2,group=32",
    "kvarn:bits=3,group=128",
    "fp8",
    "fp8:format=e5m2",
    "fp8:scale=none",
    "none",
    "none:dtype=fp16",
    "none:dtype=bf16",
    "turboquant:bits=4/kivi:bits=2,window=17",
    "kivi:bits=4,sinks=0/fp8",
    "int:bits=8/turboquant:bits=3",
)
BOUND = 1e-6
"""Norm of the difference over the norm of the torch body's output, fp32 in and out."""


def guarded_output(*shape: int) -> torch.Tensor:
    """Return NaNs between guards that `check_guards` looks at."""
    count = 1
    for size in shape:
        count *= size
    whole = torch.full((count + 128,), torch.nan)
    whole[:64] = whole[-64:] = 12345.0
    guarded_output.last = whole
    return whole[64:-64].view(shape)


def check_guards() -> None:
    """Raise where something was written beside the output."""
    whole = guarded_output.last
    assert (whole[:64] == 12345.0).all() and (whole[-64:] == 12345.0).all(), "guards overwritten"


def random_tokens(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def both(
    spec: str,
    *,
    heads: int = 2,
    groups: int = 3,
    dim: int = 64,
    value_dim: int | None = None,
    held: int = 300,
    new: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layout: str = "contiguous",
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    backend: str = "cpu",
    precision: str = "full",
    offset: float = 0,
    **config: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Return the torch body's output, the native one, and how the native cache's calls went."""
    results = []
    for name in ("torch", backend):
        generator = torch.Generator().manual_seed(seed)
        geometry = CacheGeometry(1, heads, dim, value_dim, dtype)
        pages = {"num_pages": batch * (-(-(held + new) // 128) + 1), "page_size": 128}
        options: dict[str, Any] = pages if layout == "paged" else {}
        if offset:
            options["key_offsets"] = {0: random_offset(heads, dim, norm=offset)}
        cache = create_cache(spec, geometry, layout, backend=name, precision=precision, **options)
        k = random_tokens(generator, batch, heads, held, dim, dtype=dtype)
        v = random_tokens(generator, batch, heads, held, value_dim or dim, dtype=dtype)
        rules = {key: config[key] for key in ("padding",) if key in config}
        if held:
            cache.prefill(0, k, v, config=AttendConfig(**rules))
        k = random_tokens(generator, batch, heads, new, dim, dtype=dtype)
        v = random_tokens(generator, batch, heads, new, value_dim or dim, dtype=dtype)
        q = random_tokens(generator, batch, heads * groups, new, dim, dtype=dtype)
        results.append(
            cache.attend(0, change(k), change(v), change(q), AttendConfig(**config)).float()
        )
    return results[0], results[1], cache.stats()["compute"]["attend"]


def error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the relative error of the norm; NaN where there is one."""
    return float((expected - found).norm() / expected.norm().clamp(min=1e-30))


def cases() -> list[dict[str, Any]]:
    """Return arguments of `both`: all formats, and shapes with edges."""
    found: list[dict[str, Any]] = [{"spec": spec} for spec in FORMATS]
    for dim in (36, 80, 96, 128, 256):
        found += [{"spec": spec, "dim": dim} for spec in ("turboquant:bits=3", "int:bits=8", "fp8")]
    for groups in (1, 2, 4, 5, 8):
        found += [{"spec": "turboquant:bits=4", "groups": groups, "held": 97 + groups}]
    return [*found, {"spec": "kvarn:bits=4", "new": 5, "sliding_window": 70}]


def main() -> None:
    """Run all formats and some shapes at the level of this process; print a JSON line."""
    from kvpact.kernels.cpu import library

    native.new_output = guarded_output
    worst, count = 0.0, 0
    for case in cases():
        expected, found, calls = both(**case)
        check_guards()
        assert calls == {"cpu": 1}, (case, calls)
        worst, count = max(worst, error(expected, found)), count + 1
    print(json.dumps({"level": library().level, "cases": count, "worst": worst}))


if __name__ == "__main__":
    main()
