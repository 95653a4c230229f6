"""Attention over vLLM's pages by the Triton kernels is that of torch over each sequence alone."""

import pytest
import torch
from host_reads import HostReads
from launches import Launches
from vllm_pages import TOKENS, SequenceBeside, WindowBeside

pytest.importorskip("triton")

from kvpact.contract import AttendConfig
from kvpact.geometry import CacheGeometry
from kvpact.integrations.pages.damage import Watch
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import WindowPool
from kvpact.integrations.vllm.setting import native_plan
from kvpact.kernels import choose
from kvpact.spec import parse_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUPS, DIM = 1, 2, 32
SCALE = AttendConfig(softmax_scale=0.2)
DTYPE = torch.float32
STORED = "turboquant:bits=4,sinks=0,window=0"
WINDOWED = "int:bits=4,sinks=0,window=5"
SPECS = (
    STORED,
    WINDOWED,
    pytest.param("int:bits=8,sinks=0/turboquant:bits=3,sinks=0", marks=pytest.mark.slow),
    pytest.param("fp8:sinks=0,window=3", marks=pytest.mark.slow),
    pytest.param("none:sinks=0,window=4", marks=pytest.mark.slow),
)


def close(found, right, most=5e-4):
    return (found - right).norm() <= most * right.norm()


@pytest.fixture
def make(triton_backend):
    """Return a function that makes a layer over dirty pages, and the flags of its checks."""

    def make(text, pages=8, sequences=4):
        spec = parse_spec(text)
        k, v = codecs(spec, DIM, DIM, DTYPE)
        form = PageForm(k, v, TOKENS)
        memory = torch.full((pages, HEADS, TOKENS, form.content), 0xA5, dtype=torch.uint8)
        shapes = ((HEADS, DIM), (HEADS, DIM))
        windows = WindowPool(spec.key.window, sequences, TOKENS, shapes, DTYPE, DEVICE)
        good = torch.ones(pages, dtype=torch.bool, device=DEVICE)
        compute = choose("triton", check="deferred")
        plan = compute.plan(*(compute.stream(codec, DEVICE, DTYPE) for codec in (k, v)))
        return PagedLayer(form, plan, memory.to(DEVICE), windows, good), good

    return make


def make_native(text, pages):
    spec = parse_spec(text)
    k, v = codecs(spec, DIM, DIM, DTYPE)
    form = PageForm(k, v, TOKENS)
    windows = WindowPool(spec.key.window, 4, TOKENS, ((HEADS, DIM), (HEADS, DIM)), DTYPE)
    memory = torch.zeros(pages, HEADS, TOKENS, form.content, dtype=torch.uint8)
    return PagedLayer(form, native_plan(k, v, DTYPE), memory, windows)


def make_sequence(text, pages, count, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, heads, DIM) for heads in (HEADS * GROUPS, HEADS, HEADS)]
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    cache = WindowBeside(text, CacheGeometry(1, HEADS, DIM), backend="torch")
    return SequenceBeside(qkv, cache, SCALE, pages)


def prepared(sequences, counts, device=DEVICE):
    """What a layer is given of one batch."""
    rows, start = [], 0
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.take(count)
        rows.append(sequence.row(start))
        start += count
    q, k, v = (torch.cat([s.new[i] for s in sequences]).to(device) for i in range(3))
    return rows, q, k, v, torch.full_like(q, torch.nan)


def run(layer, sequences, counts):
    """One batch; return what came out and what is right."""
    given = prepared(sequences, counts, layer.pages.device)
    layer.step(*given, SCALE)
    return given[-1].cpu(), torch.cat([s.right for s in sequences])


BATCHES = (([0], [31]), ([0, 1], [1, 11]), ([0, 1], [1, 1]), ([0, 1], [1, 1]), ([1, 0], [3, 1]))
"""Which sequences, and how many tokens of each: prompts, chunks, steps that begin a page."""


@pytest.mark.parametrize("text", SPECS)
def test_mixed_batches_over_scattered_pages_are_a_contiguous_cache(text, make):
    layer, good = make(text)
    both = make_sequence(text, [5, 2], 40, seed=1), make_sequence(text, [0, 7], 40, seed=2)
    for which, counts in BATCHES:
        out, right = run(layer, [both[i] for i in which], counts)
        assert close(out, right)
    assert bool(good.all())


@pytest.mark.parametrize("text", SPECS)
def test_pages_hold_the_bytes_of_the_native_kernels(text, make):
    """Pages that another sequence held are cleared, so they are equal wherever tokens are."""
    (layer, _), native = make(text, pages=2), make_native(text, pages=2)
    for one in (layer, native):
        for seed, pages, counts in ((3, [1, 0], (40,)), (4, [0, 1], (30, 1, 1, 4))):
            sequence = make_sequence(text, pages, 40, seed)
            for count in counts:
                run(one, [sequence], [count])
    assert torch.equal(layer.pages.cpu(), native.pages)


def test_steps_of_several_rows_are_a_few_launches_and_read_nothing(make):
    layer, _ = make(WINDOWED)
    both = [
        make_sequence(WINDOWED, [5, 2], 40, seed=1),
        make_sequence(WINDOWED, [0, 7], 40, seed=2),
    ]
    run(layer, both, [20, 9])
    launched = []
    for _ in range(3):
        given = prepared(both, [1, 1])
        with HostReads() as reads, Launches() as launches:
            layer.step(*given, SCALE)
        assert not reads.counts
        launched.append(launches.names)
    # The same rows again: what the device knows of them is sent no more.
    kernels = ["take_tokens", "prepare_queries", "attend_general", "merge_parts"]
    assert launched[2] == [*kernels, "copy_"]


def test_long_pasts_are_read_by_the_fast_kernel(make):
    """What it asks of addresses holds in vLLM's pages: it reads them 16 bytes at a time."""
    layer, _ = make(STORED, pages=10)
    sequence = make_sequence(STORED, [5, 2, 9, 0, 7, 1, 8, 3, 6], 262, seed=1)
    run(layer, [sequence], [260])
    given = prepared([sequence], [1])
    with Launches() as launches:
        layer.step(*given, SCALE)
    assert "attend_digits" in launches.names
    assert close(given[-1].cpu(), sequence.right)


def test_a_row_whose_window_is_gone_is_attended_as_stored(make):
    """What a cached prefix is: pages that others wrote, and no exact tokens."""
    layer, _ = make(WINDOWED)
    shared = make_sequence(WINDOWED, [5, 2], 40, seed=1)
    run(layer, [shared], [32])
    stored = WINDOWED.replace("window=5", "window=0")
    other = make_sequence(stored, [5, 1], 40, seed=1)
    other.take(32)
    other.held = 32
    layer._windows._at.clear()
    out, right = run(layer, [other], [1])
    assert close(out, right)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("counts", [(3,), (3, 1)], ids=["prompt", "step"])
def test_the_flag_of_the_last_page_tells_of_tokens_that_can_not_be_held(make, counts):
    layer, good = make(STORED)
    both = [make_sequence(STORED, [5], 4, seed=1), make_sequence(STORED, [3], 4, seed=2)]
    for count in counts:
        assert bool(good.all())
        given = prepared(both, [count, count])
        if count == counts[-1]:
            given[2][count - 1, 0, 3] = torch.inf
        layer.step(*given, SCALE)
    assert torch.nonzero(~good).flatten().tolist() == [5]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_sequence_is_cut_at_the_batch_after_its_tokens_could_not_be_held(make):
    layer, good = make(STORED)
    watch = Watch(DEVICE.type)
    watch.add(layer.damage)
    watch._good = good
    bad, other = make_sequence(STORED, [5], 4, seed=1), make_sequence(STORED, [3], 4, seed=2)
    given = prepared([bad, other], [3, 2])
    given[2][1, 0, 3] = torch.inf
    watch.rows = given[0]
    layer.step(*given, SCALE)
    assert watch.read() == [given[0][0]] and watch.read() == []
    out, right = run(layer, [bad, other], [1, 1])
    assert out[0].isnan().all()
    assert close(out[1], right[1])
