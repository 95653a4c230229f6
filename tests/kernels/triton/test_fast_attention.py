"""Attention over packed slots by integer products, interpreted, beside the torch body."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from encode_compare import codec_of
from fast_parts import CPU, decode_calls, error
from forms import one_per_form, slow

from kvpact.contract import AttendConfig
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.triton import tuning
from kvpact.kernels.triton.attend import attend
from kvpact.kernels.triton.digits import fast
from kvpact.kernels.triton.digits.fast import attend_fast, digits_reason, fast_of, fast_range
from kvpact.kernels.triton.digits.tables import queries_of
from kvpact.kernels.triton.forms import slots_of
from kvpact.kernels.triton.tuning import parts_of, side_by_side
from kvpact.testing.backend import unwritten_is_nan

BOUND = 5e-4
"""Of the norm of the output: queries and weights have 14 to 16 bits."""
BITS = (2, 3, 4)
PAIRS = [f"turboquant:bits={k}/turboquant:bits={v}" for k, v in itertools.product(BITS, BITS)]
INTEGERS = (
    "int:bits=8", "int:bits=4", "int:bits=8,group=64/int:bits=4,group=128",
    "int:bits=4/turboquant:bits=3", "turboquant:bits=2/int:bits=8",
    "int:bits=3,group=128/int:bits=2", "q8_0/q4_0",
)  # fmt: skip
MORE = ("int:bits=4,zero=true", "turboquant:bits=3,center=64")
"""With zeros, and with shifts per channel and group of tokens."""
SLOW = (
    *(f"turboquant:bits={bits},center={group}" for bits in BITS for group in (64, 128)),
    "int:bits=8,zero=true", "int:bits=2,group=64,zero=true",
    "int:bits=3,group=128,zero=true/int:bits=3,group=32,zero=true",
    "int:bits=4,group=1024,zero=true,rotate=true", "turboquant:bits=2,center=64/turboquant:bits=3",
)  # fmt: skip


@pytest.mark.parametrize("spec", [*one_per_form((*PAIRS, *INTEGERS)), *MORE, *slow(*SLOW)])
def test_formats(monkeypatch, spec):
    assert error(decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128)), parts=2) < BOUND


@pytest.mark.parametrize("spec", [
    # K of 2, 3, 4 and 8 bits, and so V.
    *(PAIRS[1], PAIRS[6], INTEGERS[2], INTEGERS[4], INTEGERS[5]),
    *slow(PAIRS[0], *PAIRS[2:6], *PAIRS[7:], *INTEGERS[:2], INTEGERS[3], *MORE, *SLOW),
])  # fmt: skip
def test_the_order_of_older_versions(monkeypatch, spec):
    calls = decode_calls(monkeypatch, spec, 270, (1, 1, 4, 1, 128))
    assert error(calls, parts=2, kw=8) < BOUND


@pytest.mark.parametrize(
    ("bits", "page"),
    [(4, 32), (3, 64), *slow(*((bits, page) for bits in BITS for page in (32, 64, 128)))],
)
def test_pages(monkeypatch, bits, page):
    calls = decode_calls(monkeypatch, f"turboquant:bits={bits}", 270, (2, 1, 2, 1, 64), page=page)
    assert len(calls) == 2
    assert error(calls, parts=2) < BOUND


@pytest.mark.parametrize(("spec", "dim"), (
    ("turboquant:bits=3", 256),
    ("turboquant:bits=4", 96),
    ("int:bits=8", 80),
    *slow(
        ("turboquant:bits=4", 256),
        ("turboquant:bits=2", 64),
        ("turboquant:bits=3", 64),
        ("turboquant:bits=3", 80),
        ("turboquant:bits=2", 112),
        ("int:bits=4", 40),
        ("int:bits=4,zero=true", 80),
        ("turboquant:bits=4,center=64", 96),
    ),
))  # fmt: skip
def test_widths(monkeypatch, spec, dim):
    assert error(decode_calls(monkeypatch, spec, 200, (1, 1, 2, 1, dim))) < BOUND


@pytest.mark.parametrize(("spec", "groups", "queries"), (
    ("turboquant:bits=4", 3, 1),
    ("int:bits=4,zero=true", 2, 4),
    *slow(
        *(("turboquant:bits=4", *rows) for rows in ((2, 4), (5, 1), (8, 1), (4, 4))),
        *(("int:bits=4,zero=true", *rows) for rows in ((3, 1), (8, 1))),
    ),
))  # fmt: skip
def test_rows(monkeypatch, spec, groups, queries):
    calls = decode_calls(monkeypatch, spec, 200, (1, 2, groups, queries, 64))
    assert error(calls) < BOUND


@pytest.mark.parametrize("parts", (1, 9))
def test_parts(monkeypatch, parts):
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 200, (1, 1, 4, 1, 64))
    assert error(calls, parts=parts) < BOUND


@pytest.mark.parametrize("options", (",sinks=0,window=0", ",sinks=7,window=33"))
def test_exact_tokens_are_left_out(monkeypatch, options):
    calls = decode_calls(monkeypatch, f"turboquant:bits=4{options}", 203, (1, 1, 4, 1, 64))
    assert error(calls) < BOUND


def test_padding(monkeypatch):
    padding = torch.tensor([0, 37, 150])
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 300, (3, 1, 2, 1, 64), padding=padding)
    assert fast_range(calls[0])[0].tolist() == [4, 41, 154]
    assert error(calls) < BOUND


@pytest.mark.parametrize("config", (
    AttendConfig(softmax_scale=0.5),
    AttendConfig(sliding_window=90, softcap=20.0),
    *slow(AttendConfig(sliding_window=150), AttendConfig(softcap=1.5)),
), ids=("scale", "window and softcap", "window", "softcap"))  # fmt: skip
def test_rules(monkeypatch, config):
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 300, (2, 1, 2, 4, 64), config)
    assert error(calls) < BOUND


def test_negative_scales_and_outliers(monkeypatch):
    """Least-squares scales may be negative, and weights of one block may differ by far."""
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 300, (1, 1, 2, 1, 64))
    for stream in calls[0].view[:2]:
        for segment in range(-(-stream.exact_from // stream.source.segment_tokens)):
            stream.source.gather("scale", segment, segment + 1)[..., ::3].mul_(-20)
    assert error(calls) < BOUND


@pytest.mark.parametrize("config", (
    AttendConfig(sliding_window=100, softcap=2.0),
    AttendConfig(is_causal=False, sink_logits=torch.tensor([1.0, -1.0, 0.0, 3.0])),
), ids=("window and softcap", "sink logits"))  # fmt: skip
def test_beside_exact_tokens(monkeypatch, config):
    """The whole of attention: parts of both kernels, merged and rotated back."""
    spec = "turboquant:bits=4,sinks=3,window=5/int:bits=4,sinks=2,window=9"
    calls = decode_calls(monkeypatch, spec, 170, (1, 2, 2, 3, 64), config)
    expected = TORCH.attend(calls)
    monkeypatch.setattr(fast, "LEAST_TOKENS", 1)
    monkeypatch.setattr(tuning, "TOKENS_OF_A_PART", 64)
    parts = []

    def seen(made, *rest):
        parts.append(made.parts)
        attend_fast(made, *rest)

    monkeypatch.setattr(attend, "attend_fast", seen)
    with unwritten_is_nan():
        found = attend.attend_triton(calls)
    assert parts == [3]
    assert (found - expected).norm() < BOUND * expected.norm()


def test_unlike_lengths_in_one_launch(monkeypatch):
    """A row of the batch may have no packed token at all."""
    monkeypatch.setattr(fast, "LEAST_TOKENS", 1)
    monkeypatch.setattr(tuning, "TOKENS_OF_A_PART", 128)
    calls = []
    for tokens in (300, 20, 150):
        with pytest.MonkeyPatch.context() as spied:
            calls += decode_calls(spied, "turboquant:bits=3", tokens, (1, 1, 4, 1, 64))
    slots = [slots_of(side.codec, CPU) for side in calls[0].view[:2]]
    assert fast_of(calls, *slots) is not None
    expected = TORCH.attend(calls)
    with unwritten_is_nan():
        found = attend.attend_triton(calls)
    for row in range(3):
        assert (found[row] - expected[row]).norm() < BOUND * expected[row].norm()


def test_another_order_is_wrong(monkeypatch):
    """Queries in the order of other versions make another result: the test above can fail."""
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 200, (1, 1, 2, 1, 64))
    monkeypatch.setattr(fast, "queries_of", lambda *given: queries_of(*given[:-1], 8))
    assert error(calls, kw=4) > 0.5


def test_what_is_not_covered():
    def reason(k, v="turboquant:bits=4", rows=4, dim=128):
        codecs = (codec_of(k, "k", dim, torch.float16), codec_of(v, "v", dim, torch.float16))
        slots = (slots_of(codec, CPU) for codec in codecs)
        return digits_reason(*slots, rows)

    assert reason("turboquant:bits=4") == ""
    assert "64 query rows" in reason("turboquant:bits=4", rows=64)
    assert "6 bits" in reason("turboquant:bits=6")
    assert "V has no levels" in reason("turboquant:bits=4", "turboquant:bits=8")
    assert reason("int:bits=4,zero=true", rows=8) == ""
    assert "16 query rows" in reason("int:bits=4,zero=true", rows=16)
    assert "K has no levels" in reason("fp8")
    for method in ("kivi:bits=4", "kvarn:bits=4"):
        assert "K has scales per channel" in reason(method)
    assert "V has scales per channel" in reason("turboquant:bits=4", "kvarn:bits=4")
    assert "groups of 32" in reason("int:bits=2")
    assert "groups of 32" in reason("int:bits=2,zero=true")
    assert "wide" in reason("turboquant:bits=4", dim=100)


def test_when_it_is_worth_a_launch(monkeypatch):
    calls = decode_calls(monkeypatch, "turboquant:bits=4", 300, (1, 1, 2, 1, 64))
    k, v = (slots_of(side.codec, CPU) for side in calls[0].view[:2])
    assert fast_of(calls, k, v) is None
    longer = decode_calls(monkeypatch, "turboquant:bits=4", 700, (1, 1, 2, 1, 64))
    assert fast_of(longer, k, v).parts == 3
    longer[0].view.k.source.prepared["triton:aligned"] = False
    assert fast_of(longer, k, v) is None
    longer[0].view.k.source.prepared.clear()
    masked = [longer[0]._replace(config=AttendConfig(mask=torch.ones(1, 1, 1, 701).bool()))]
    assert fast_of(masked, k, v) is None


@pytest.mark.parametrize("spec", ("trellis:bits=4", "int:bits=8", "turboquant:bits=2", *MORE))
def test_long_pasts_are_attended_fast(monkeypatch, spec):
    calls = decode_calls(monkeypatch, spec, 700, (1, 1, 2, 1, 64))
    k, v = (slots_of(side.codec, CPU) for side in calls[0].view[:2])
    assert fast_of(calls, k, v) is not None


def test_parts_fill_the_device():
    assert parts_of(131072, 8, CPU) == 132 and parts_of(8192, 8, CPU) == 32
    assert parts_of(100, 64, CPU) == 1 and parts_of(10**6, 10**4, CPU) == 1


def test_order_by_version():
    versions = ("3.6.0", "3.7.1", "3.8.0", "3.10.0")
    assert [side_by_side(version) for version in versions] == [8, 8, 4, 4]
