"""Torch's candidates of `attend.py`."""

import torch
from attend_ours import SHAPES, copies
from runner import Call
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK = ("sdpa fp32", "matmul fp32", "matmul bf16")
TORCH = ("sdpa", "matmul")


def is_torch(name: str) -> bool:
    """Return whether a candidate is one of torch's."""
    return name.startswith(TORCH)


def hopeless(times: dict[str, list[float]]) -> set[str]:
    """Return torch's candidates that take five times as long as its best one.

    They are not what anything is compared with, and would take most of the time.
    """
    torches = {name: min(found) for name, found in times.items() if is_torch(name)}
    return {name for name, found in torches.items() if found > 5 * min(torches.values())}


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention as two matrix products per KV head: what torch is fast at."""
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


def torch_calls(tokens: int, shape: str, ring: int, compiled: bool) -> dict[str, list[Call]]:
    """Return torch's candidates, a call per cache of the ring."""
    calls: dict[str, list[Call]] = {}
    if compiled:  # code that was compiled for another number of threads has that number in it
        torch.compiler.reset()
    for name in DTYPES:
        pairs, q = exact_ring(name, tokens, shape, ring)
        rows = q.view(1, SHAPES[shape][0], -1, q.shape[-1])
        calls[f"sdpa {name}"] = [
            lambda k=k, v=v, q=q: scaled_dot_product_attention(q, k, v, enable_gqa=True)
            for k, v in pairs
        ]
        calls[f"matmul {name}"] = [lambda k=k, v=v, q=rows: grouped(q, k, v) for k, v in pairs]
        if compiled and name != "fp16":
            fast = torch.compile(grouped, dynamic=False)
            fast(rows, *pairs[0])
            calls[f"matmul {name}, compiled"] = [
                lambda k=k, v=v, q=rows, fast=fast: fast(q, k, v) for k, v in pairs
            ]
    return calls


def exact_ring(
    name: str, tokens: int, shape: str, ring: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Return K and V of each cache of the ring, and q, in the dtype of that name."""
    heads, groups, dim = SHAPES[shape]
    dtype, generator = DTYPES[name], torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in "kv")
    count = copies(k.nbytes + v.nbytes, ring)
    pairs = [(k, v)] + [(k.clone(), v.clone()) for _ in range(count - 1)]
    return pairs, torch.randn(1, heads * groups, 1, dim, generator=generator).to(dtype)
