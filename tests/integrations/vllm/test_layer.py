"""What vLLM's pages hold, and what attention over them gives: no vLLM is needed."""

import random

import pytest
import torch
from forms import slow
from vllm_pages import TOKENS, SequenceBeside, WindowBeside, make_layer, random_qkv, run, step

from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.pages import named
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import Row
from kvpact.spec import parse_spec

SPECS = (
    "none:sinks=0,window=0", "turboquant:bits=4,sinks=0,window=0", "int:bits=8,sinks=0,window=0",
    "fp8:sinks=0,window=0",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false,sinks=0,window=0",
    "turboquant:bits=3,sinks=0,window=0/int:bits=4,sinks=0,window=0", "turboquant:bits=4,sinks=0",
    "int:bits=4,sinks=0,window=5",
)  # fmt: skip
HEADS, GROUPS, DIM = 2, 2, 64
SCALE = AttendConfig(softmax_scale=0.125)


def make(text, dtype=torch.bfloat16, pages=16, fill=0):
    return make_layer(text, HEADS, DIM, dtype, pages, fill=fill)


def tokens(count, seed, dtype=torch.bfloat16):
    return random_qkv(count, HEADS * GROUPS, HEADS, DIM, seed, dtype)


def make_sequence(text, pages, count, seed):
    geometry = CacheGeometry(1, HEADS, DIM, dtype=torch.bfloat16)
    return SequenceBeside(tokens(count, seed), WindowBeside(text, geometry), SCALE, pages)


def check_mixed_batches(layer, first, second, third):
    for sequences, counts in (
        ([first], [70]), ([first, second], [1, 33]), ([second, first, third], [1, 1, 17]),
        ([third, second, first], [1, 40, 1]), ([third, first, second], [1, 1, 1]),
    ):  # fmt: skip
        out, right = run(layer, sequences, counts, SCALE)
        assert torch.equal(out, right)


TABLES = ([9, 2, 14, 5], [0, 15, 7], [3, 11])


@pytest.mark.parametrize("text", SPECS)
def test_mixed_batches_over_scattered_pages_are_a_contiguous_cache(text):
    sequences = [make_sequence(text, table, 100, seed) for seed, table in enumerate(TABLES)]
    check_mixed_batches(make(text, fill=0xA5), *sequences)


@pytest.mark.parametrize("text", [
    "none:sinks=0,window=0", "int:bits=8,sinks=0,window=0", "turboquant:bits=4,sinks=0",
    "turboquant:bits=4,sinks=0,window=5/fp8:sinks=0,window=5",
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batches_of_mla_latents_are_a_contiguous_cache(text, dtype):
    rank, rope, sequences = 128, 64, []
    for seed, table in enumerate(TABLES):
        generator = torch.Generator().manual_seed(seed)
        widths = ((4, rank + rope), (1, rank), (1, rope))
        given = [torch.randn(100, *width, generator=generator).to(dtype) for width in widths]
        cache = WindowBeside(text, CacheGeometry.mla(1, rank, rope, dtype))
        sequences.append(SequenceBeside(given, cache, SCALE, table))
    check_mixed_batches(make_layer(text, 1, rank, dtype, 16, fill=0xA5, rope=rope), *sequences)


@pytest.mark.parametrize(
    "text", ["turboquant:bits=4,sinks=0,window=0", "turboquant:bits=4,sinks=0"]
)
def test_the_same_runners_take_rows_that_lie_apart(text):
    """Rows side by side are read where they lie, in one tensor with q; others are gathered."""
    q, k, v = tokens(71, 3)
    beside = torch.cat([x.flatten(1) for x in (q, k, v)], 1).split(
        [x[0].numel() for x in (q, k, v)], 1
    )
    views = [x.unflatten(1, (-1, DIM)) for x in beside]
    a, b = (9, 2), (0, 15)
    layer, right = make(text), make(text)
    runners = []
    for start, rows in (
        (0, [Row(0, 30, 0, a[:1]), Row(30, 60, 0, b[:1])]),
        (60, [Row(0, 1, 30, a[:1]), Row(1, 2, 30, b[:1])]),
        (62, [Row(0, 1, 31, a[:1]), Row(1, 4, 0, (5,)), Row(4, 5, 31, b[:1])]),
        (67, [Row(0, 1, 32, a), Row(1, 2, 32, b)]),
    ):
        end, outs = start + rows[-1].end, []
        for one, given in ((layer, views), (right, (q, k, v))):
            batch = [x[start:end] for x in given]
            outs.append(torch.full(batch[0].shape, torch.nan, dtype=torch.bfloat16))
            one.step(rows, *batch, outs[-1], SCALE)
        assert torch.equal(*outs)
        runners.append(layer._runners)
    assert torch.equal(layer.pages, right.pages)
    assert not runners[0] and runners[1]
    assert all(x is y for x, y in zip(runners[1], runners[2], strict=True))


@pytest.mark.parametrize("text", SPECS)
def test_tokens_written_again_replace_those_behind_them(text):
    layer, fresh = make(text), make(text)
    rejected, kept = tokens(40, 6), tokens(60, 7)
    table = (4, 6)

    def step(one, qkv, start, end, held):
        q, k, v = (x[start:end] for x in qkv)
        pages = table[: -(-(held + end - start) // TOKENS)]
        one.step([Row(0, end - start, held, pages)], q, k, v, torch.empty_like(q), SCALE)

    step(layer, kept, 0, 20, 0)
    step(layer, rejected, 0, 25, 20)
    for one in (layer, fresh):
        if one is fresh:
            step(one, kept, 0, 20, 0)
        step(one, kept, 20, 60, 20)
    assert torch.equal(layer.pages, fresh.pages)


@pytest.mark.parametrize(("dim", "content"), [(64, 68), (128, 132)])
def test_four_bits_are_a_quarter_of_bfloat16_and_a_scale(dim, content):
    spec = parse_spec("turboquant:bits=4,sinks=0,window=0")
    assert PageForm(*codecs(spec, dim, dim, torch.bfloat16), 128).content == content


@pytest.mark.parametrize("wrong", [
    torch.zeros(4, HEADS, TOKENS, 67, dtype=torch.uint8),
    torch.zeros(4, HEADS, 2 * TOKENS, 68, dtype=torch.uint8),
    torch.zeros(4, HEADS, TOKENS, 34, dtype=torch.bfloat16),
    torch.zeros(4, TOKENS, HEADS, 68, dtype=torch.uint8).transpose(1, 2),
    torch.zeros(4, HEADS, TOKENS * 68, dtype=torch.uint8),
], ids=["bytes", "tokens", "dtype", "tokens outermost", "rank"])  # fmt: skip
def test_pages_of_another_layout_are_refused(wrong):
    k, v = codecs(parse_spec("turboquant:bits=4,sinks=0,window=0"), DIM, DIM, torch.bfloat16)
    form = PageForm(k, v, TOKENS)
    with pytest.raises(GeometryError, match="vLLM hands over pages"):
        form.fields(wrong)


@pytest.mark.parametrize("size", [16, 48, 0])
def test_pages_that_cut_a_tile_are_refused(size):
    pair = codecs(parse_spec("none:sinks=0,window=0"), DIM, DIM, torch.float32)
    with pytest.raises(GeometryError, match="--block-size"):
        PageForm(*pair, size)


@pytest.mark.parametrize("text", [SPECS[1], *SPECS[4:], *slow(SPECS[0], *SPECS[2:4])])
def test_random_sequences_share_abort_and_take_each_others_pages(text):
    """Two hundred sequences over eight pages; each answers as in pages of its own."""
    generator = random.Random(10)
    layer, free, running = make(text, pages=8, fill=0xA5), list(range(8)), []
    for number in range(200):
        while len(free) < 2:
            gone = running.pop(generator.randrange(len(running)))  # done, aborted or preempted
            free += gone.pages
        generator.shuffle(free)
        running.append(make_sequence(text, [free.pop(), free.pop()], 64, seed=number))
        rows = [one for one in running if one.held < 64 and generator.random() < 0.8]
        counts = [min(generator.choice((1, 1, 1, 5, 31)), 64 - one.held) for one in rows]
        if rows:
            out, right = run(layer, rows, counts, SCALE)
            assert torch.equal(out, right)


def test_who_reads_all_stores_the_same_bytes_and_a_copied_page_has_a_copy_of_the_window():
    pair = [make_layer("int:bits=2,sinks=0,window=8", 2, 64) for _ in range(2)]
    first = random_qkv(80, 4, 2, 64, 1, torch.float32)
    rows = [Row(0, 40, 0, (1, 2)), Row(40, 80, 0, (3, 4))]
    step(pair[0], rows, first, AttendConfig())
    k, v, cut = pair[1].read(rows, *first[1:], 96)
    assert torch.equal(k[:80], first[1]) and torch.equal(v[:80], first[2]) and cut == {}
    assert not k[80:].any() and torch.equal(pair[0].pages, pair[1].pages)
    new = [torch.cat([x, x]) for x in random_qkv(1, 4, 2, 64, 2, torch.float32)]
    for layer in pair:
        layer.pages[4] = layer.pages[2]
        layer.copied([2], [4])
    rows = [Row(0, 1, 40, (1, 2)), Row(1, 2, 40, (1, 4))]
    out, _ = step(pair[0], rows, new, AttendConfig())
    k, v, _ = pair[1].read(rows, *new[1:], 82)
    assert torch.equal(out[0], out[1]) and torch.equal(k[:41], k[41:])
    assert torch.equal(k[32:40], first[1][32:40]) and not torch.equal(k[:32], first[1][:32])
    q = new[0][:1].transpose(0, 1)
    right = torch.nn.functional.scaled_dot_product_attention(
        q, *(x[:41].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
    )
    torch.testing.assert_close(out[:1].transpose(0, 1), right, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("text", SPECS)
def test_prompts_of_any_length_are_stored_by_one_runner_as_in_the_ordinary_way(text, monkeypatch):
    monkeypatch.setattr(named, "ROOM", 4)
    quick, defining = make(text, fill=0xA5), make(text, fill=0x5A)
    monkeypatch.setattr(defining, "_begin", lambda *_: False)
    runners, steps = [], set()
    for count, table in ((40, (9, 2)), (7, (5,)), (129, (1, 4, 0, 11, 3)), (64, (7, 6))):
        outs = []
        for layer in (quick, defining):
            out, cut = step(layer, [Row(2, 2 + count, 0, table)], tokens(count + 3, count), SCALE)
            after, _ = step(layer, [Row(0, 1, count, (*table, 8))], tokens(1, 1), SCALE)
            assert not cut
            outs.append(torch.cat([out, after]))
        runners.append(quick._first)
        steps.update(quick._runners)
        assert torch.equal(*outs)
        assert torch.equal(*(layer.pages[list(table)] for layer in (quick, defining)))
    assert runners[0] is runners[1]
    assert runners[2] is runners[3]  # five pages needed a larger table
    assert len(steps) == (runners[0] is not None)


def test_what_one_call_refuses_the_ordinary_way_decides():
    layer, right = make(SPECS[-2]), make(SPECS[-2])
    good, spoiled = tokens(40, 3), [x.clone() for x in tokens(40, 3)]
    spoiled[1][35] = torch.inf
    step(layer, [Row(0, 40, 0, (1, 2))], good, SCALE)
    out, cut = step(layer, [Row(0, 40, 0, (3, 4))], spoiled, SCALE)
    wanted, _ = step(right, [Row(0, 35, 0, (3, 4))], [x[:35] for x in good], SCALE)
    assert list(cut) == [0]
    assert torch.equal(out[:35], wanted)
    assert out[35:].isnan().all()
    assert torch.equal(layer.pages[3:5], right.pages[3:5])
