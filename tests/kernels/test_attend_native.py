"""Attention by the native kernels is the torch body's, at every shape, format and SIMD level."""

import itertools
import math

import pytest
import torch
from closeness import BOUND, bound_of, error
from compare import WAYS, cases, few, latents, many, same
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matrix import ATTENDED, TRELLISES
from random_cases import times
from simd_levels import at_level, levels

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")

every_way = pytest.mark.parametrize("way", WAYS)
FOUR = "turboquant:bits=4"
NEW = {"few": 5, "many": 30, "latents": 30, "prompts": 305}
"""New tokens in each way, where it matters; 300 others are held, but by prompts."""


def each(**options):
    """Return the cases of the product of options, of which some stand alone."""
    lists = [x if isinstance(x, (tuple, list)) else (x,) for x in options.values()]
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*lists)]


LATENT_SPECS = (FOUR, "turboquant:bits=3/fp8", "int:bits=8", "kivi:bits=4", "none")
LATENT_CASES = (*each(spec=LATENT_SPECS, new=1), *each(spec=LATENT_SPECS, new=17, held=45))
LATENT_SHAPES = [
    {"groups": groups, "dim": rank, "value_dim": rope}
    for groups, rank, rope in ((16, 512, 64), (1, 32, 8), (5, 40, 36), (3, 40, 8), (128, 96, 32))
]
AT_LEVELS = {
    "few": cases(),
    "many": [{"new": 17} | case for case in cases()],
    "latents": [case | shape for case, shape in itertools.product(LATENT_CASES, LATENT_SHAPES)],
    "prompts": each(spec=FOUR, new=(1, 33, 137), dim=(36, 64, 128)),
}

EACH = (FOUR, f"{FOUR},window=0,sinks=0", f"{FOUR},window=1,sinks=3")
UNLIKE_ENDS = ("turboquant:bits=4,window=3", "kivi:bits=2,group=128", "fp8")
EDGES = {
    "few lengths": each(spec=EACH, held=(1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 513)),
    "few heads": each(spec=(FOUR, "turboquant:bits=5", "fp8"), groups=(*range(1, 9), 12, 16)),
    "few queries": each(spec=FOUR, new=(2, 5, 16), batch=2),
    "few widths": [{"spec": FOUR, "dim": k, "value_dim": v} for k, v in ((96, 64), (40, 128))],
    "few formats": each(spec=ATTENDED, groups=1, dim=80, held=128, seed=1),
    "many lengths": each(spec=EACH, held=(1, 31, 33, 300), new=(17, 33, 130)),
    "many rows": [
        *each(spec=FOUR, groups=(1, 3, 4, 8), new=(1, 3, 17, 90), batch=2),
        {"spec": FOUR, "heads": 1, "groups": 8, "new": 150, "held": 400},  # more than one task's
        {"spec": "kvarn:bits=4", "new": 130, "sliding_window": 70, "softcap": 3.0},
    ],
    "many widths": each(spec=ATTENDED, groups=3, dim=36, value_dim=100, held=70, batch=2),
    "many ends": each(  # what is packed in K may be exact in V
        spec=[f"{k}/{v}" for k in (FOUR, "kivi:bits=4", "kvarn:bits=4") for v in UNLIKE_ENDS],
        held=(129, 190, 300),
        new=20,
    ),
    "latents lengths": each(
        spec=(EACH[1], f"{FOUR},window=40", f"{FOUR},window=3/kivi:bits=4"),
        **{"held": (1, 31, 64, 129, 700), "dim": 128, "new": 3, "batch": 2},
    ),
    "latents rows": each(spec=FOUR, groups=32, new=40, held=200),
    "prompts lengths": each(
        spec=FOUR, new=(1, 5, 6, 15, 16, 17, 31, 33, 127, 129, 255, 257, 600), dim=(64, 36)
    ),
    "prompts shapes": [
        {"spec": FOUR, "new": 137, "batch": 2, "groups": groups, "dim": k, "value_dim": v}
        for groups in (1, 2, 4, 5)
        for k, v in ((16, 16), (128, 128), (80, 256), (100, 3), (5, 33))
    ],
}


@every_way
@pytest.mark.parametrize("level", levels())
def test_every_format_at_every_level(level, way):
    with at_level(level):
        for case in AT_LEVELS[way]:
            same(WAYS[way], **case)


@pytest.mark.parametrize("edges", EDGES)
def test_every_edge(edges):
    for case in EDGES[edges]:
        same(WAYS[edges.split()[0]], **case)


def rules(total, new, heads):
    """Return what may be asked of attention, for so many tokens, new ones and query heads."""
    even = torch.arange(total) % 2 == 0
    masks = (
        torch.arange(total) % 3 > 0,
        torch.linspace(-3, 3, total),
        torch.where(even, 0.0, torch.finfo(torch.float32).min),
        torch.where(even, 0.0, -torch.inf).bfloat16(),
    )
    return [
        *({"sliding_window": window} for window in (1, 17, 40, 250)),
        *({"softcap": 1.5}, {"softmax_scale": 0.5}, {"is_causal": False}, {"exact_new": False}),
        {"padding": torch.tensor([0, 140])},
        {"sink_logits": torch.linspace(-2, 4, heads)},
        *({"mask": mask.expand(1, 1, new, total)} for mask in masks),
    ]


@every_way
def test_every_rule(way):
    new, shape = NEW[way], {"spec": FOUR, "batch": 2}
    total = new if way == "prompts" else 300 + new
    if way == "latents":
        shape |= {"dim": 64, "value_dim": 16}
    for rule in rules(total, new, 16 if way == "latents" else 6):
        same(WAYS[way], new=new, **shape, **rule)
        same(WAYS[way], new=new, **shape, **{"sliding_window": 40, "is_causal": False} | rule)
    if way == "prompts":
        for rule in (rule for rule in rules(total, new, 16) if "exact_new" not in rule):
            same(latents, held=0, new=new, **shape, dim=64, value_dim=16, **rule)


@every_way
def test_masks(way):
    """A query that sees nothing gets zeros; masks may have strides."""
    new, heads = NEW[way], 16 if way == "latents" else 6
    total = new if way == "prompts" else 300 + new
    mask = torch.ones(1, 1, new, total, dtype=torch.bool)
    mask[:, :, 3] = False
    expected, found, _ = WAYS[way](FOUR, mask=mask, new=new)
    assert not found[:, :, 3].any() and not expected[:, :, 3].any() and found[:, :, 4].any()
    assert error(expected, found) <= bound_of(FOUR, way)
    wide = torch.rand(1, heads, new, 2 * total, generator=torch.Generator().manual_seed(0)) > 0.4
    for view in (wide[..., ::2], wide[..., 3 : 3 + total]):
        same(WAYS[way], spec=FOUR, new=new, mask=view)


@pytest.mark.parametrize("kernel", (few, many))
def test_weights_below_the_normal_numbers_are_nothing(kernel, monkeypatch):
    """Processors take a hundred times as long over them; a large value would show them."""
    if kernel is many:
        monkeypatch.setattr(native, "many_rows", lambda *_: 1)
    cache = create_cache("none", CacheGeometry(1, 1, 32, dtype=torch.float32), backend="cpu")
    k, v, q = torch.zeros(1, 1, 40, 32), torch.ones(1, 1, 40, 32), torch.zeros(1, 1, 40, 32)
    k[..., 0], q[..., 0] = -130 * math.log(2), 1.0  # 2**-130 beside the first token's 1
    k[:, :, 0], v[:, :, 1:] = 0.0, 1e38
    cache.prefill(0, k[:, :, :-1], v[:, :, :-1])
    config = AttendConfig(softmax_scale=1.0)
    output = cache.attend(0, k=k[:, :, -1:], v=v[:, :, -1:], q=q[:, :, -1:], config=config)
    assert torch.equal(output, torch.ones(1, 1, 1, 32))


@every_way
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(way, dtype):
    """The output is rounded to the dtype: at most its last bit differs, seldom."""
    same(WAYS[way], torch.finfo(dtype).eps / 4, spec=FOUR, dtype=dtype, new=NEW[way])


@every_way
@pytest.mark.parametrize("layout", ("contiguous", "paged"))
def test_inputs_without_alignment_or_in_other_orders(way, layout):
    def odd(x):
        batch, heads, tokens, dim = x.shape
        wide = torch.full((batch, tokens, heads, dim + 3), torch.nan, dtype=x.dtype)
        view = wide.transpose(1, 2)[..., 1 : dim + 1]
        view.copy_(x)
        return view

    for change in (odd, lambda x: x.mT.contiguous().mT):
        same(WAYS[way], spec=FOUR, new=NEW[way], batch=2, change=change, layout=layout)


@pytest.mark.parametrize("make", (few, many, latents))
def test_pages(make):
    for spec in (FOUR, "kivi:bits=2", "fp8"):
        same(make, spec=spec, layout="paged", batch=3, held=290, new=1 if make is few else 20)


CASES = {
    # How many are tried in `make test`, new tokens, query heads per KV head, held tokens.
    "few": (125, st.integers(1, 4), st.integers(1, 6), st.integers(1, 290)),
    "many": (60, st.integers(1, 40), st.integers(1, 6), st.integers(1, 290)),
    "prompts": (30, st.integers(2, 330), st.integers(1, 6), st.just(0)),
    "latents": (30, st.integers(1, 5), st.integers(1, 20), st.integers(1, 290)),
}


@times
@pytest.mark.parametrize("way", CASES)
def test_random_cases(way, times):
    count, new, groups, held = CASES[way]
    widths = (16, 32, 64, 512) if way == "latents" else (16, 32, 48, 64, 100)

    @settings(max_examples=times * count, deadline=None)
    @given(
        spec=st.sampled_from(ATTENDED),
        heads=st.just(1) if way == "latents" else st.integers(1, 3),
        groups=groups,
        dim=st.sampled_from(widths),
        value_dim=st.sampled_from((16, 36, 64, 100)),
        held=held,
        new=new,
        batch=st.integers(1, 2),
        seed=st.integers(0, 1000),
        sliding_window=st.none() | st.integers(1, 300),
        softcap=st.none() | st.floats(0.5, 50),
        is_causal=st.booleans(),
    )
    def random(**case):
        assume(not (way == "latents" and "/" in case["spec"]))
        if way == "prompts":
            del case["held"]
        same(WAYS[way], 2 * bound_of(case["spec"], way), **case)

    random()


@pytest.mark.parametrize(("make", "spec", "groups"), (
    (few, FOUR, 2), (few, "turboquant:bits=8", 3), (few, FOUR, 7), (many, FOUR, 3),
    (latents, FOUR, 16),
))  # fmt: skip
def test_threads_give_the_same_numbers(make, spec, groups, set_threads):
    """One thread takes all tokens of a head, more of them split the tokens and merge."""
    case = {"spec": spec, "held": 6000, "groups": groups, "new": 1 if make is few else 2}
    case |= {} if make is latents else {"heads": 3}
    outputs = []
    for count in (1, 2, 5):
        set_threads(count)
        expected, found, _ = make(**case)
        assert error(expected, found) <= bound_of(spec, "few" if make is few else "other")
        outputs.append(found)
    assert all(error(outputs[0], other) <= BOUND for other in outputs[1:])


def test_long_contexts_lose_nothing_to_rounding():
    """Sums of blocks are added up, not numbers: the error hardly grows with the tokens."""
    same(many, spec=FOUR, heads=1, groups=2, dim=32, new=2, held=20000)


@pytest.mark.parametrize("spec", (
    FOUR, "turboquant:bits=2", "int:bits=8", "int:bits=4,group=64", "kivi:bits=2,group=32",
    *TRELLISES[8:10], TRELLISES[1], TRELLISES[5],
))  # fmt: skip
def test_queries_and_weights_of_16_bits_lose_next_to_nothing(spec):
    """Levels are whole numbers, and exact; digits that are missing or misplaced would show."""
    trellis = spec in TRELLISES
    base = {"backend": "auto", "heads": 1, "held": 300} if trellis else {"held": 700}
    for groups, dim in ((1, 64), (3, 80), (4, 128), (8, 32 if trellis else 36), (6, 256)):
        case = {"spec": f"{spec},window=0,sinks=0", "groups": groups, "dim": dim, **base}
        same(few, 1.5e-4, **case)
