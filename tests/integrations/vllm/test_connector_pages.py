"""Chunks out of vLLM's pages have the bytes of a `PrefixCache`; pages get them back."""

import pytest
import torch
from vllm_pages import make_layer, step

from kvpact import PrefixCache, create_cache
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, NonFiniteError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import Row
from kvpact.integrations.vllm.connector_pages import PackedPages, PlainPages
from kvpact.integrations.vllm.setting import native_plan
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore

HEADS, DIM, PAGE, EACH = 2, 64, 32, 2
TABLE = (7, 2, 5, 3)
COUNT = len(TABLE) * PAGE
CONFIG = AttendConfig(softmax_scale=0.125)
SPECS = [
    "none:sinks=0,window=0",
    "turboquant:bits=4,sinks=0,window=0",
    "int:bits=8,sinks=0,window=0/fp8:sinks=0,window=0",
]


def form_of(text, dtype=torch.bfloat16):
    pair = codecs(parse_spec(text), DIM, DIM, dtype)
    return PageForm(*pair, PAGE), native_plan(*pair, dtype)


def make(text):
    """A layer over dirty pages of kvpact's, and what the connector has of them."""
    layer = make_layer(text, HEADS, DIM, torch.bfloat16, pages=10, sequences=4, fill=0xA5)
    return layer, PackedPages(form_of(text)[0], layer.pages)


def make_plain(text, dtype=torch.bfloat16, seed=0):
    """What the connector has of vLLM's own pages, and the pages."""
    memory = torch.full((10, HEADS, PAGE, 2 * DIM), torch.nan, dtype=dtype)
    return PlainPages(*form_of(text, dtype), memory, orders(seed)), memory


def tokens(count, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, HEADS, DIM, generator=generator).to(dtype)


def attend(layer, row, qkv):
    return step(layer, [row], qkv, CONFIG)[0]


def check_chunks_of_a_prefix_cache(text, chunks, qkv):
    """Return a contiguous cache of the tokens, when chunks were compared with those saved of it."""
    geometry = CacheGeometry(1, HEADS, DIM, dtype=qkv.dtype)
    cache = create_cache(text, geometry, backend="cpu")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
    cache.attend(0, k=k, v=v, q=q, config=CONFIG)
    prefixes, ids, size = PrefixCache(MemoryStore(), cache, model="any"), [*range(COUNT)], 64
    prefixes.save(ids)
    right = [
        prefixes._kind.unpack(prefixes.store.get(key), i, ids[i * size : (i + 1) * size]).slots
        for i, key in enumerate(prefixes.keys(ids))
    ]
    assert torch.equal(chunks, torch.stack(right))
    return cache


@pytest.mark.parametrize("text", SPECS)
def test_chunks_and_pages_hold_the_bytes_of_a_prefix_cache(text):
    qkv = tokens(COUNT, seed=0)
    layer, pages = make(text)
    attend(layer, Row(0, COUNT, 0, TABLE), qkv)
    chunks = pages.pack(pages.copy(TABLE), EACH)
    check_chunks_of_a_prefix_cache(text, chunks, qkv)

    before = layer.pages.clone()
    pages.paste((8, 0, 9), pages.unpack(chunks, EACH), first=1)
    used, was = (x.flatten(2)[..., : pages.page_bytes // HEADS] for x in (layer.pages, before))
    assert torch.equal(used[[8, 0, 9]], was[[2, 5, 3]])
    others = [i for i in range(10) if i not in (8, 0, 9)]
    assert torch.equal(layer.pages[others], before[others])


def test_a_loaded_sequence_reads_as_stored_where_another_ones_window_was():
    text = "turboquant:bits=3,sinks=0,window=40"
    qkv, old, new = (tokens(n, seed) for seed, n in enumerate((EACH * PAGE, EACH * PAGE, 1), 2))
    source, pages = make(text)
    attend(source, Row(0, EACH * PAGE, 0, (1, 2)), qkv)
    copied = pages.copy((1, 2))

    stored, clean = make(text)  # has no windows: what a prefix cache's hit reads
    clean.paste((4, 6), copied, 0)
    right = attend(stored, Row(0, 1, EACH * PAGE, (4, 6, 8)), new)

    layer, mine = make(text)
    attend(layer, Row(0, EACH * PAGE, 0, (4, 6)), old)
    mine.paste((4, 6), copied, 0)
    layer.loaded((4, 6))
    assert torch.equal(attend(layer, Row(0, 1, EACH * PAGE, (4, 6, 8)), new), right)


def test_a_page_that_was_loaded_is_cleared_for_the_next_sequence():
    (layer, pages), (fresh, fresh_pages) = (make(SPECS[1]) for _ in range(2))
    pages.paste((4,), pages.copy((3,)), 0)
    layer.loaded((4,))
    for one in (layer, fresh):
        attend(one, Row(0, 10, 0, (4,)), tokens(10, seed=5))
    mine, right = pages.copy((4,)), fresh_pages.copy((4,))
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


# vLLM's own pages: tokens are encoded where they are saved, decoded where they are loaded.


def orders(seed):
    """Some order for each side: vLLM's depends on the processor."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randperm(PAGE * DIM, generator=generator) for _ in range(2))
    return k, v


def fill(memory, kv, seed=0):
    """Write tokens as vLLM would."""
    for side, order in enumerate(orders(seed)):
        for place, page in enumerate(TABLE):
            part = kv[side, place * PAGE : (place + 1) * PAGE].transpose(0, 1).flatten(1)
            half = memory[page].view(HEADS, 2, -1)[:, side]
            half[:, order] = part


def read(memory, seed=0):
    sides = []
    for side, order in enumerate(orders(seed)):
        halves = memory[list(TABLE)].view(len(TABLE), HEADS, 2, -1)[:, :, side]
        x = halves[:, :, order].view(len(TABLE), HEADS, PAGE, DIM)
        sides.append(x.transpose(1, 2).flatten(0, 1))
    return torch.stack(sides)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", [SPECS[1], "int:bits=8,sinks=0,window=0"])
def test_chunks_and_vllms_pages_hold_what_a_cache_of_the_spec_holds(text, dtype):
    qkv = tokens(COUNT, 2, dtype)
    pages, memory = make_plain(text, dtype)
    fill(memory, qkv[1:])
    chunks = pages.pack(pages.copy(TABLE), EACH)
    cache = check_chunks_of_a_prefix_cache(text, chunks, qkv)

    # Another engine's pages have another order.
    others, theirs = make_plain(text, dtype, seed=9)
    others.paste(TABLE, others.unpack(chunks, EACH), 0)
    layer = cache.entry(0)
    decoded = torch.stack([layer.dequantize(side)[0].transpose(0, 1) for side in "kv"])
    assert torch.equal(read(theirs, seed=9), decoded) and not torch.equal(decoded, qkv[1:])
    untouched = [i for i in range(10) if i not in TABLE]
    assert theirs[untouched].isnan().all()


def test_tokens_that_the_spec_can_not_hold_are_refused_by_name():
    pages, memory = make_plain(SPECS[1])
    fill(memory, tokens(COUNT, 2)[1:])
    memory[5, 1, 3, 9] = torch.inf
    with pytest.raises(NonFiniteError):
        pages.pack(pages.copy(TABLE), EACH)


@pytest.mark.parametrize("shape", [(10, HEADS, PAGE, DIM), (10, HEADS, 16, 2 * DIM), (10, 64)])
def test_pages_of_another_layout_are_refused(shape):
    memory = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        PlainPages(*form_of(SPECS[1]), memory, orders(0))
