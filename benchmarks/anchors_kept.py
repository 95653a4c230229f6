"""kvpact's caches, and torch over exact K and V."""

import torch
from anchors_case import Case, Maker, Ring, ring_of
from attend_calls import calls_of, grouped, views_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpact import CacheGeometry, create_cache

SPECS = ("int:bits=8", "int:bits=4", "turboquant:bits=4", "trellis:bits=4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def makers(case: Case) -> dict[str, Maker]:
    """Return a maker of calls for torch in each dtype, and for each spec."""
    torches = {f"torch {name}": _torch(case, dtype) for name, dtype in DTYPES.items()}
    return torches | {spec: _ours(case, spec) for spec in SPECS}


def _torch(case: Case, dtype: torch.dtype) -> Maker:
    k, v, q = (x[None].to(dtype) for x in (case.k, case.v, case.q))
    rows, mask = q.view(1, k.shape[1], -1, q.shape[3]), case.mask()

    def call(k: Tensor, v: Tensor) -> Tensor:
        if case.new == 1:  # as products: what torch is fastest at for one query
            return grouped(rows, k, v).view(q.shape[1:]).transpose(0, 1)
        found = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return found[0].transpose(0, 1)

    return lambda threads: [lambda pair=pair: call(*pair) for pair in ring_of(case, k, v)]


def _ours(case: Case, spec: str) -> Maker:
    geometry = CacheGeometry(1, case.k.shape[0], case.k.shape[2], dtype=torch.float32)
    cache = create_cache(spec, geometry, backend="cpu")
    k, v, q = (x[None] for x in (case.k, case.v, case.q))
    for start in range(0, case.past, 2048):
        end = min(start + 2048, case.past)
        cache.store(0, k=k[:, :, start:end], v=v[:, :, start:end])
    new = [x[:, :, case.past :].contiguous() for x in (k, v)]
    calls = calls_of(views_of(cache, case.ring), *new, q)

    def made(threads: int) -> Ring:
        return [lambda call=call: call()[0].transpose(0, 1) for call in calls]

    return made
