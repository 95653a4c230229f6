"""Chunks out of vLLM's pages have the bytes of a `PrefixCache`; pages get them back."""

import pytest
import torch

from kvpact import PrefixCache, create_cache
from kvpact.contract import AttendConfig
from kvpact.geometry import CacheGeometry
from kvpact.integrations.vllm.connector_pages import PackedPages
from kvpact.integrations.vllm.layer import PagedLayer
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.integrations.vllm.window import Row, WindowPool
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore

HEADS, DIM, PAGE, EACH = 2, 64, 32, 2
CONFIG = AttendConfig(softmax_scale=0.125)
SPECS = [
    "none:sinks=0,window=0",
    "turboquant:bits=4,sinks=0,window=0",
    "int:bits=8,sinks=0,window=0/fp8:sinks=0,window=0",
]


def make(text):
    spec = parse_spec(text)
    pair = codecs(spec, DIM, DIM, torch.bfloat16)
    form = PageForm(*pair, PAGE)
    memory = torch.full((10, HEADS, PAGE, form.content), 0xA5, dtype=torch.uint8)
    shape = (HEADS, DIM)
    windows = WindowPool(spec.key.window, 4, PAGE, (shape, shape), torch.bfloat16)
    layer = PagedLayer(form, native_plan(*pair, torch.bfloat16), memory, windows)
    return layer, PackedPages(form, memory), memory


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, HEADS, DIM, generator=generator).to(torch.bfloat16)


def step(layer, row, qkv):
    out = torch.full_like(qkv[0], torch.nan)
    layer.step([row], *qkv, out, CONFIG)
    return out


@pytest.mark.parametrize("text", SPECS)
def test_chunks_have_the_bytes_of_a_prefix_cache(text):
    count = 2 * EACH * PAGE
    qkv = tokens(count, seed=0)
    layer, pages, _ = make(text)
    table = (7, 2, 5, 3)
    step(layer, Row(0, count, 0, table), qkv)
    chunks = pages.pack(pages.copy(table), EACH)

    cache = create_cache(text, CacheGeometry(1, HEADS, DIM, dtype=torch.bfloat16), backend="cpu")
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
    cache.attend(0, k, v, q, CONFIG)
    prefixes, ids = PrefixCache(MemoryStore(), cache, model="any"), list(range(count))
    prefixes.save(ids)
    kind = prefixes._kind
    for index, key in enumerate(prefixes.keys(ids)):
        part = ids[index * EACH * PAGE : (index + 1) * EACH * PAGE]
        right = kind.unpack(prefixes.store.get(key), index, part)
        assert torch.equal(chunks[index], right.slots)


@pytest.mark.parametrize("text", SPECS)
def test_pages_get_their_bytes_back_from_the_wanted_page_on(text):
    qkv = tokens(2 * EACH * PAGE, seed=1)
    layer, pages, memory = make(text)
    step(layer, Row(0, 2 * EACH * PAGE, 0, (7, 2, 5, 3)), qkv)
    chunks = pages.pack(pages.copy((7, 2, 5, 3)), EACH)
    before = memory.clone()
    pages.paste((8, 0, 9), pages.unpack(chunks, EACH), first=1)
    used = memory.flatten(2)[..., : pages.page_bytes // HEADS]
    was = before.flatten(2)[..., : pages.page_bytes // HEADS]
    assert torch.equal(used[[8, 0, 9]], was[[2, 5, 3]])
    others = [i for i in range(10) if i not in (8, 0, 9)]
    assert torch.equal(memory[others], before[others])


def test_a_loaded_sequence_reads_as_stored_where_another_ones_window_was():
    text = "turboquant:bits=3,sinks=0,window=40"
    qkv, old, new = tokens(EACH * PAGE, seed=2), tokens(EACH * PAGE, seed=3), tokens(1, seed=4)
    source, pages, _ = make(text)
    step(source, Row(0, EACH * PAGE, 0, (1, 2)), qkv)
    copied = pages.copy((1, 2))

    stored, clean, _ = make(text)  # has no windows: what a prefix cache's hit reads
    clean.paste((4, 6), copied, 0)
    right = step(stored, Row(0, 1, EACH * PAGE, (4, 6, 8)), new)

    layer, mine, _ = make(text)
    step(layer, Row(0, EACH * PAGE, 0, (4, 6)), old)
    mine.paste((4, 6), copied, 0)
    layer.loaded((4, 6))
    assert torch.equal(step(layer, Row(0, 1, EACH * PAGE, (4, 6, 8)), new), right)


def test_a_page_that_was_loaded_is_cleared_for_the_next_sequence():
    text = "turboquant:bits=4,sinks=0,window=0"
    layer, pages, _ = make(text)
    fresh, fresh_pages, _ = make(text)
    pages.paste((4,), pages.copy((3,)), 0)
    layer.loaded((4,))
    for one in (layer, fresh):
        step(one, Row(0, 10, 0, (4,)), tokens(10, seed=5))
    mine, right = pages.copy((4,)), fresh_pages.copy((4,))
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))
