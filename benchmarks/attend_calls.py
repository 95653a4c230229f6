"""The candidates of `attend.py`: rings of caches, plain reads of the same bytes, and torch's."""

import math
from ctypes import c_void_p
from typing import Any

import runner
import torch
from runner import Call
from torch.nn.functional import scaled_dot_product_attention

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache
from kvpact.cache.layer.layer import CacheLayer
from kvpact.kernels import AttendCall
from kvpact.kernels.cpu import library

SHAPES = {"A": (8, 4, 128), "B": (3, 3, 64)}  # KV heads, query heads per KV head, width
PAGED = "4 bits, paged"
OURS = {
    "fp16, fused": "none:dtype=fp16",
    "4 bits": "turboquant:bits=4",
    "8 bits": "int:bits=8",
    "3 bits": "turboquant:bits=3",
    "2 bits": "turboquant:bits=2",
    "trellis 4": "trellis:bits=4",
    "trellis 3": "trellis:bits=3",
    "kivi 4": "kivi:bits=4",
    "kvarn 4": "kvarn:bits=4",
    "centred 4": "turboquant:bits=4,center=64",
    PAGED: "turboquant:bits=4",
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK = ("sdpa fp32", "matmul fp32", "matmul bf16")
TORCH = ("sdpa", "matmul")


def copies(size: int, ring: int) -> int:
    """Return how many caches of `size` bytes make a ring of `ring` megabytes."""
    return max(1, math.ceil(ring * 1e6 / size))


def read_name(name: str) -> str:
    """Return the candidate that reads the bytes of candidate `name`'s slots."""
    return f"read, {OURS[name]}"


def our_calls(tokens: int, shape: str, ring: int, names: list[str]) -> dict[str, list[Call]]:
    """Return a ring of calls per candidate, and per spec one that reads as many bytes."""
    calls: dict[str, list[Call]] = {}
    for name in names:
        calls[name], size = our_ring(name, tokens, shape, ring)
        if read_name(name) not in calls:
            calls[read_name(name)] = reads(size, 2 * SHAPES[shape][0], ring)
    return calls


def our_ring(name: str, tokens: int, shape: str, ring: int) -> tuple[list[Call], int]:
    """Return a call per cache of the ring, and the bytes of one cache."""
    heads, groups, dim = SHAPES[shape]
    spec = OURS[name]
    geometry = CacheGeometry(1, heads, dim, dtype=torch.float32)
    generator = torch.Generator().manual_seed(tokens)
    cache = runner.filled(create_cache(spec, geometry, backend="cpu"), tokens)
    held = held_by(cache)
    given = spec, geometry, tokens, copies(held, ring), generator
    views = paged_views(*given) if name == PAGED else views_of(cache, ring)
    q = torch.randn(1, heads * groups, 1, dim, generator=generator)
    new = torch.randn(1, heads, 1, dim, generator=generator)
    calls = calls_of(views, new, new, q)
    for call in calls:
        call()  # a step finds what the step before it has kept beside the slots
    return calls, held


def held_by(cache: Any) -> int:
    """Return the bytes of all tensors of the first layer."""
    return sum(tensor.nbytes for tensor in cache._layers[0].tensors())


def views_of(cache: Any, ring: int) -> list[tuple[Any, Any]]:
    """Return plans and views of a cache and of as many copies of it as the ring needs."""
    caches = [cache]
    for _ in range(copies(held_by(cache), ring) - 1):
        caches.append(cache.fork())
        caches[-1].select(torch.tensor([0]))
    return [past(c.entry(0)) for c in caches]


def calls_of(
    views: list[tuple[Any, Any]], k: torch.Tensor, v: torch.Tensor, q: torch.Tensor
) -> list[Call]:
    """Return calls that attend over views and new tokens."""
    made = [(plan, (AttendCall(view, k, v, q, AttendConfig()),)) for plan, view in views]
    return [lambda plan=plan, given=given: plan.attend(given) for plan, given in made]


def past(layer: CacheLayer) -> tuple[Any, Any]:
    """Return who computes for a layer, and a view of what it holds."""
    held = layer._held
    return held.plan, layer._view(held, held.padding)


def reads(size: int, streams: int, ring: int) -> list[Call]:
    """Return calls that read `size` bytes in as many pieces as there are streams."""
    piece = size // streams
    shape, whole = (streams, piece // 4), torch.int32
    blocks = [torch.randint(1, 99, shape, dtype=whole) for _ in range(copies(size, ring))]
    rows = [(c_void_p * streams)(*(row.data_ptr() for row in block)) for block in blocks]
    given, read = (library().bit, torch.get_num_threads(), streams), library().loaded.kvp_read
    return [
        lambda rows=rows, block=block: read(*given, rows, shape[1] * 4) or block
        for rows, block in zip(rows, blocks, strict=True)
    ]


def paged_views(
    spec: str, geometry: CacheGeometry, tokens: int, count: int, generator: torch.Generator
) -> list[tuple[Any, Any]]:
    """Return plans and views of sequences whose pages of 128 tokens lie in turns."""
    count = min(count, max(2, 2**18 // tokens))
    pages = count * (-(-tokens // 128) + 1)
    cache = PagedKVCache(spec, geometry, pages, 128, backend="cpu")
    seqs = [cache.allocate() for _ in range(count)]
    shape = (geometry.num_kv_heads, 1024, geometry.head_dim)
    for start in range(0, tokens, 1024):
        part = min(1024, tokens - start)
        k, v = (torch.randn(shape, generator=generator)[:, :part] for _ in "kv")
        for seq in seqs:
            cache.append(0, {seq: (k, v)})
    layers = [cache.layer_of(seq, 0) for seq in seqs]
    return [past(layer) for layer in layers]


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
