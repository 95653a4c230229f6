"""Native kernels over codes of a trellis against the torch bodies; a script for SIMD levels."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from compare import both as both_bodies
from compare import check_guards, error, guarded_output
from decode_compare import compare_slots, packed
from encode_compare import random_pieces
from rows_compare import latents as latent_bodies

from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import library
from kvpact.methods.trellis_keys import TreatedKeys

UNTREATED = "center=0,first=false,weights=false,blocks=false"
TREATED = (
    *(f"trellis:bits={bits}" for bits in range(1, 7)),
    "trellis:bits=4,center=128,states=8",
    "trellis:bits=3,center=0",
    "trellis:bits=3,first=false",
    "trellis:bits=4,weights=false",
    "trellis:bits=2,blocks=false",
    "trellis:bits=4,weights=false,blocks=false",
    "trellis:bits=4,center=0,first=false",
    "trellis:bits=5,center=0,weights=false,blocks=false",
)
PLAIN = (
    *(f"trellis:bits={bits},{UNTREATED}" for bits in range(1, 7)),
    f"trellis:bits=4,states=8,seed=7,{UNTREATED}",
    f"trellis:bits=3,states=8,{UNTREATED}",
)
FORMATS = (*PLAIN, *TREATED)
CACHES = (
    *FORMATS,
    "trellis:bits=4,window=0,sinks=0",
    "turboquant:bits=4/trellis:bits=3,window=17",
    "trellis:bits=3,sinks=0/kivi:bits=4",
)


# Whoever encodes: attention is what is compared.
both = partial(both_bodies, backend="auto", heads=1, held=200)
latents = partial(latent_bodies, backend="auto")


def decoded(spec: str, side: str, dim: int, end: int = 70, seed: int = 0) -> str:
    """Return what differs between native numbers and torch's."""
    treated = side == "k" and spec in TREATED
    heads = 128 if treated else end
    (tokens,), _ = random_pieces(spec, side, dim, heads, 0, torch.float32, seed)
    codec, store = packed(spec, side, tokens)
    assert not treated or isinstance(codec, TreatedKeys)
    return compare_slots(codec, store, 5, end - 1, torch.float32, False) or compare_slots(
        codec, store, 0, end, torch.float16, True
    )


def cases() -> list[dict[str, Any]]:
    """Return arguments of `both`."""
    found: list[dict[str, Any]] = [{"spec": spec} for spec in CACHES]
    for dim in (32, 96, 128):
        found += [{"spec": spec, "dim": dim} for spec in ("trellis:bits=4", "trellis:bits=3")]
    for groups in (1, 2, 4, 5, 8):
        found += [{"spec": "trellis:bits=2", "groups": groups, "held": 97 + groups}]
    return [*found, {"spec": "trellis:bits=4", "new": 5, "sliding_window": 70}]


def main() -> None:
    """Run everything at the level of this process; print a JSON line."""
    native.new_output = guarded_output
    bad = [
        (spec, side, dim)
        for spec in FORMATS
        for side in "kv"
        for dim in (32, 64)
        if decoded(spec, side, dim)
    ]
    worst, count = 0.0, 0
    found = [both(**case) for case in cases()]
    native.MANY_ROWS = 1
    found += [both(**case) for case in cases()]
    found += [latents(spec, held=200) for spec in ("trellis:bits=4", "trellis:bits=3")]
    for expected, output, calls in found:
        check_guards()
        assert calls == {"cpu": 1}, calls
        worst, count = max(worst, error(expected, output)), count + 1
    print(json.dumps({"level": library().level, "cases": count, "worst": worst, "bad": bad}))


if __name__ == "__main__":
    main()
