"""Keys of a calibrated `trellis` in vLLM's pages: groups wait in the window; no vLLM is needed."""

import random

import pytest
import torch
from tests.helpers.connector_engine import Engine, request
from vllm_pages import make_layer

from kvpact.cache.paged.pool import PageSource
from kvpact.contract import AttendConfig
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import Row
from kvpact.integrations.vllm.calibrated import of_rank
from kvpact.kernels.torch.slots import TorchEncoder
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore

HEADS, DIM, PAGE = 2, 64, 128
SCALE = AttendConfig(softmax_scale=0.125)
GROUPS, ALONE = "trellis:bits=4,sinks=0", "trellis:bits=4,center=0,sinks=0"


def keys(count, seed, dtype=torch.bfloat16):
    """Keys with a mean of their own, of which some resemble the first one."""
    generator = torch.Generator().manual_seed(seed)
    middle, first = torch.randn(2, 1, HEADS, DIM, generator=torch.Generator().manual_seed(77))
    x = torch.randn(count, HEADS, DIM, generator=generator) + 2 * middle
    x[::37] = 6 * first + x[::37] / 4
    return x.to(dtype)


def learnt(text, seed=5):
    codec = parse_spec(text).key.key_codec(DIM, torch.float32)
    return codec.fit(keys(256, seed, torch.float32).transpose(0, 1).unsqueeze(0)).state(), {}


class Sequence:
    """A sequence, the tokens that were written, and what its pages should hold and answer."""

    def __init__(self, text, pages, count, seed):
        generator = torch.Generator().manual_seed(seed + 1000)
        shape = count, HEADS, DIM
        q, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(2))
        self.qkv, self.pages, self.held = (q, keys(count, seed), v), pages, 0
        self.spec, self.alone = parse_spec(text), set()  # groups whose keys are packed one by one
        self.codecs = codecs(self.spec, DIM, DIM, torch.bfloat16, learnt(text))
        self.form = PageForm(*self.codecs, PAGE)
        self.first = 0  # of its window
        self.made = {}

    def row(self, start, count):
        held, self.held = self.held, self.held + count
        return Row(start, start + count, held, tuple(self.pages[: -(-self.held // PAGE)]))

    def encoded(self, side, alone):
        """A codec, the arrays that it gives of all whole groups, and what these hold; made once."""
        if (side, alone) not in self.made:
            codec = self.codecs[side].singly() if alone else self.codecs[side]
            x = self.qkv[1 + side].float().transpose(0, 1).unsqueeze(0)
            arrays = codec.encode(x[:, :, : x.shape[2] // codec.group * codec.group])
            read = codec.transform.inverse(codec.decode(arrays))
            self.made[side, alone] = codec, arrays, read
        return self.made[side, alone]

    def parts(self, side, end):
        """What is packed of the first tokens: start, end and how, group by group."""
        group = self.codecs[side].group
        for start in range(0, end, 64):
            alone = group > 1 and start // 64 in self.alone
            if group == 1 or alone or start + 64 <= end:
                yield start, min(start + 64, end), self.encoded(side, alone)

    def packed(self, end):
        """Pages with the slots of the first tokens, as torch makes them."""
        memory = torch.zeros(len(self.pages), HEADS, PAGE, self.form.content, dtype=torch.uint8)
        for side, fields in enumerate(self.form.fields(memory)):
            source = PageSource(fields, tuple(range(len(memory))), PAGE)
            for start, stop, (codec, arrays, _) in self.parts(side, end):
                per = {f.name: f.tokens if f.per_group else 1 for f in codec.fields}
                cut = {n: x[:, :, start // per[n] : -(-stop // per[n])] for n, x in arrays.items()}
                TorchEncoder(codec).write(cut, source, start)
        return memory

    def read(self, side, end):
        parts = [read[:, :, a:b] for a, b, (_, _, read) in self.parts(side, end)]
        return torch.cat([*parts, torch.zeros(1, HEADS, 0, DIM)], 2)

    def right(self, count):
        """What the last `count` tokens attend to: slots, the window, and themselves as given."""
        held, width = self.held - count, self.spec.key.window
        exact = max(self.first, held - width)
        q, k, v = (x[: self.held].float().transpose(0, 1) for x in self.qkv)
        held_parts = [self.read(side, held)[0, :, :exact] for side in (0, 1)]
        k, v = (torch.cat([x, y[:, exact:]], 1) for x, y in zip(held_parts, (k, v), strict=True))
        logits = q[:, held:] @ k.mT * SCALE.softmax_scale
        mask = torch.ones_like(logits).tril(held) > 0
        return (logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def serve(layer, parts):
    """One batch of sequences and how many tokens of each; return what came out, each apart."""
    rows, start = [], 0
    for one, count in parts:
        rows.append(one.row(start, count))
        start += count
    places = [(one, slice(one.held - count, one.held)) for one, count in parts]
    given = [torch.cat([one.qkv[i][place] for one, place in places]) for i in range(3)]
    out = torch.full_like(given[0], torch.nan)
    assert layer.step(rows, *given, out, SCALE) == {}
    return out.split([count for _, count in parts])


def check(layer, parts):
    for out, (one, count) in zip(serve(layer, parts), parts, strict=True):
        right = one.right(count)
        assert (out.float() - right).norm() <= 6e-3 * right.norm()


def check_pages(layer, one):
    """Every whole page has the bytes that torch gives, and what is packed of the last one."""
    memory = one.packed(one.held)
    whole = one.held // PAGE
    assert whole and torch.equal(layer.pages[list(one.pages[:whole])], memory[:whole])


def make(text, **options):
    return make_layer(
        text, HEADS, DIM, torch.bfloat16, 8, fill=0xA5, learnt=learnt(text), tokens=PAGE, **options
    )


@pytest.mark.parametrize(
    "text", [GROUPS, ALONE, f"{GROUPS},window=80/int:bits=8,sinks=0,window=80"]
)
def test_prompts_chunks_and_steps_give_the_bytes_of_torch_and_what_they_hold(text):
    layer = make(text)
    one, two = Sequence(text, (5, 2, 4), 300, 1), Sequence(text, (0, 7, 1), 300, 2)
    for counts in ((70, 1), (1, 62), (1, 1), (1, 1), (57, 5), (3, 90), (1, 1), (100, 101)):
        check(layer, list(zip((one, two), counts, strict=True)))
    for _ in range(30):
        check(layer, [(one, 1), (two, 1)])
    for each in (one, two):
        check_pages(layer, each)


def test_keys_that_wait_in_a_window_which_is_taken_are_packed_one_by_one():
    layer = make(GROUPS, sequences=1)
    one, two = Sequence(GROUPS, (5, 2), 256, 3), Sequence(GROUPS, (1, 7), 256, 4)
    check(layer, [(one, 90)])
    check(layer, [(two, 40)])  # it takes the only window
    for each, count in ((one, 1), (two, 1), (one, 50), (two, 120), (one, 115), (two, 95)):
        each.first = each.held
        if each.held % 64:
            each.alone.add(each.held // 64)
        check(layer, [(each, count)])
    for each in (one, two):
        check_pages(layer, each)


def test_tokens_written_again_replace_those_that_waited():
    layer, fresh = make(GROUPS), make(GROUPS)
    one, other = Sequence(GROUPS, (4, 6), 200, 6), Sequence(GROUPS, (4, 6), 200, 6)
    rejected = Sequence(GROUPS, (4, 6), 200, 8)
    check(layer, [(one, 80)])
    rejected.held = 80
    serve(layer, [(rejected, 30)])
    one.first = 80 + 30 - 64  # where the window began
    check(layer, [(one, 120)])
    check(fresh, [(other, 80)])
    check(fresh, [(other, 120)])
    assert torch.equal(layer.pages, fresh.pages)


@pytest.mark.parametrize("text", [GROUPS, ALONE])
def test_random_sequences_share_abort_and_take_each_others_pages(text):
    """Each answers as in pages of its own."""
    generator = random.Random(12)
    layer, free, running = make(text), list(range(8)), []
    for number in range(12):
        while len(free) < 2:
            gone = running.pop(generator.randrange(len(running)))  # done, aborted or preempted
            free += gone.pages
        generator.shuffle(free)
        running.append(Sequence(text, (free.pop(), free.pop()), 200, number))
        rows = [one for one in running if one.held < 200 and generator.random() < 0.8]
        counts = [min(generator.choice((1, 1, 5, 63, 64, 130)), 200 - one.held) for one in rows]
        if rows:
            check(layer, list(zip(rows, counts, strict=True)))
    for one in running:
        if one.held >= PAGE:
            check_pages(layer, one)


def test_a_rank_has_what_was_learnt_of_its_heads():
    state = {"first": torch.arange(8).view(4, 2)}
    parts = [of_rank((state, {}), 2, rank, 2)[0]["first"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), state["first"])
    # Of four ranks that share two heads, two have each.
    two = {"first": state["first"][:2]}
    found = [of_rank((two, {}), 1, rank, 4)[0]["first"].flatten().tolist() for rank in range(4)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_what_codecs_learnt_is_in_the_connector_s_keys():
    store, ids = MemoryStore(), list(range(202))
    first, same, other = (
        Engine(store, spec=ALONE, learnt=learnt(ALONE, seed)) for seed in (1, 1, 2)
    )
    first.serve(request("first", ids), [7, 3, 11, 2, 9, 4, 30])
    assert same.matched(request("second", ids)) == 192
    assert other.matched(request("second", ids)) == 0
    assert other.counts.total()["misses"] == 3
