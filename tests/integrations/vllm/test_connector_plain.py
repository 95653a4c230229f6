"""vLLM's own pages: chunks hold what kvpact encodes of their tokens, pages what it decodes."""

import pytest
import torch

from kvpact import PrefixCache, create_cache
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, NonFiniteError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.vllm.connector_plain import PlainPages
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore

HEADS, DIM, PAGE, EACH = 2, 64, 32, 2
TABLE = (7, 2, 5, 3)


def orders(seed):
    """Some order for each side: vLLM's depends on the processor."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randperm(PAGE * DIM, generator=generator) for _ in range(2))
    return k, v


def make(text, dtype=torch.bfloat16, seed=0):
    spec = parse_spec(text)
    pair = codecs(spec, DIM, DIM, dtype)
    memory = torch.full((10, HEADS, PAGE, 2 * DIM), torch.nan, dtype=dtype)
    plain = PlainPages(PageForm(*pair, PAGE), native_plan(*pair, dtype), memory, orders(seed))
    return plain, memory


def tokens(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, len(TABLE) * PAGE, HEADS, DIM, generator=generator).to(dtype)


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
@pytest.mark.parametrize("text", ["turboquant:bits=4,sinks=0,window=0", "int:bits=8,sinks=0"])
def test_chunks_and_pages_hold_what_a_cache_of_the_spec_holds(text, dtype):
    kv = tokens(dtype)
    pages, memory = make(text, dtype)
    fill(memory, kv)
    chunks = pages.pack(pages.copy(TABLE), EACH)

    geometry = CacheGeometry(1, HEADS, DIM, dtype=dtype)
    cache = create_cache(text.replace(",window=0", "") + ",window=0", geometry, backend="cpu")
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in kv)
    cache.attend(0, k, v, k, AttendConfig(softmax_scale=0.125))
    prefixes, ids = PrefixCache(MemoryStore(), cache, model="any"), list(range(len(TABLE) * PAGE))
    prefixes.save(ids)
    size = EACH * PAGE
    for i, key in enumerate(prefixes.keys(ids)):
        right = prefixes._kind.unpack(prefixes.store.get(key), i, ids[i * size : (i + 1) * size])
        assert torch.equal(chunks[i], right.slots)

    # Another engine's pages have another order.
    others, theirs = make(text, dtype, seed=9)
    others.paste(TABLE, others.unpack(chunks, EACH), 0)
    layer = cache.entry(0)
    decoded = torch.stack([layer.dequantize(side)[0].transpose(0, 1) for side in "kv"])
    assert torch.equal(read(theirs, seed=9), decoded)
    assert not torch.equal(decoded, kv)
    untouched = [i for i in range(10) if i not in TABLE]
    assert theirs[untouched].isnan().all()


def test_tokens_that_the_spec_can_not_hold_are_refused_by_name():
    pages, memory = make("turboquant:bits=4,sinks=0,window=0")
    fill(memory, tokens())
    memory[5, 1, 3, 9] = torch.inf
    with pytest.raises(NonFiniteError):
        pages.pack(pages.copy(TABLE), EACH)


@pytest.mark.parametrize("shape", [(10, HEADS, PAGE, DIM), (10, HEADS, 16, 2 * DIM), (10, 64)])
def test_pages_of_another_layout_are_refused(shape):
    pair = codecs(parse_spec("int:bits=8,sinks=0"), DIM, DIM, torch.bfloat16)
    plan, memory = native_plan(*pair, torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        PlainPages(PageForm(*pair, PAGE), plan, memory, orders(0))
