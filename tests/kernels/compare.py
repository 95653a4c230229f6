"""Attention by a backend and by the torch bodies, over the same tokens."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # for scripts

import torch
from closeness import bound_of, error
from guards import guarded_outputs
from matrix import ATTENDED

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.cpu import attend as native
from kvpact.testing import random_offset
from kvpact.testing.data import by_name


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
    offset: float = 0,
    latent: bool = False,
    many: int | None = None,
    **config: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Return the torch body's output, the native one, and how the native cache's calls went."""
    results = []
    widths = dim, value_dim or dim
    query_dim, scale = (sum(widths), {"softmax_scale": 0.07}) if latent else (dim, {})
    for name in ("torch", backend):
        generator = torch.Generator().manual_seed(seed)
        geometry = CacheGeometry(1, heads, dim, value_dim, dtype)
        if latent:
            geometry = CacheGeometry.mla(1, *widths, dtype)
        pages = {"num_pages": batch * (-(-(held + new) // 128) + 1), "page_size": 128}
        options: dict[str, Any] = pages if layout == "paged" else {}
        if offset:
            options["key_offsets"] = {0: random_offset(heads, dim, norm=offset)}
        cache = create_cache(spec, geometry, layout, backend=name, **options)
        past, given = (
            [random_tokens(generator, batch, heads, count, d, dtype=dtype) for d in widths]
            for count in (held, new)
        )
        given.append(random_tokens(generator, batch, heads * groups, new, query_dim, dtype=dtype))
        rules = {key: config[key] for key in ("padding",) if key in config}
        chosen = native.many_rows if many is None else lambda *_: many
        with guarded_outputs(native), patch.object(native, "many_rows", chosen):
            if held:
                cache.prefill(0, *past, config=AttendConfig(**rules))
            rules = AttendConfig(**scale | config)
            results.append(cache.attend(0, **by_name(*map(change, given)), config=rules).float())
    return results[0], results[1], cache.stats()["compute"]["attend"]


few = both
many = partial(both, many=1)
latents = partial(both, latent=True, heads=1, groups=16, dim=512, value_dim=64)
prompts = partial(both, held=0)
WAYS = {"few": few, "many": many, "latents": latents, "prompts": prompts}
"""The native kernels of attention, by what is asked of them."""


def same(make: Callable[..., Any] = few, bound: float | None = None, **case: Any) -> None:
    """Raise where a native kernel did not compute, or not what torch does."""
    expected, found, calls = make(**case)
    rows = case.get("batch", 1) if case.get("layout") == "paged" else 1
    assert calls == {"cpu": rows}, (case, calls)
    limit = bound or bound_of(case["spec"], "few" if make is few else "other")
    assert error(expected, found) <= limit, case


def cases() -> list[dict[str, Any]]:
    """Return arguments of `both`: all formats, and shapes with edges."""
    found: list[dict[str, Any]] = [{"spec": spec} for spec in ATTENDED]
    for dim in (36, 80, 96, 128, 256, 576):
        specs = ("turboquant:bits=3", "int:bits=8", "kivi:bits=4,group=64", "fp8")
        found += [{"spec": spec, "dim": dim} for spec in specs]
    for groups in (1, 2, 4, 5, 8):
        found += [{"spec": "turboquant:bits=4", "groups": groups, "held": 97 + groups}]
    return [*found, {"spec": "kvarn:bits=4", "new": 5, "sliding_window": 70, "softcap": 3.0}]
