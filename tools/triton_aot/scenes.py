"""All that dispatch may launch: attention, steps, encoding and decoding, taken down."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from machine_code import Launch, recorded
from variants import HEADS, TOKENS, SlotsOfZeros, Variant, others, side, steps

from kvpact.kernels.base import StepRow, StepTokens, TokenMemory
from kvpact.kernels.triton.columns import COLUMNS, K_SIDE, V_SIDE
from kvpact.kernels.triton.decode.kernel import decode_triton
from kvpact.kernels.triton.encode.encoder import TritonEncoder, encode_trellis
from kvpact.kernels.triton.forms import SlotPlaces, slots_of
from kvpact.kernels.triton.step.step import Taker, TritonStep, sent_flags, take, taking_of

FORMATS = (
    "turboquant:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=2",
    "turboquant:bits=6",
    "turboquant:bits=3,center=64",
    "tq3",
    "int:bits=8",
    "int:bits=4",
    "int:bits=5",
    "int:bits=4,zero=true",
    "int:bits=4,group=1024,zero=true,rotate=true",
    "fp8",
    "fp8:format=e5m2,scale=none",
    "kivi:bits=2",
    "kivi:bits=4",
    "kvarn:bits=3",
    "kvarn:bits=4",
    "none",
    "trellis:bits=4,first=false,weights=false,blocks=false,center=0",
    "trellis:bits=4,first=false,weights=false,blocks=false",
    "trellis:bits=4",
    "trellis:bits=3",
)
"""Each kind of slots, at 128 channels."""
WIDE = (
    "turboquant:bits=4",
    "int:bits=8",
    "kivi:bits=2",
    "kvarn:bits=4",
    "trellis:bits=4",
)
"""What is compiled for other widths, too."""
WIDTHS = (64, 96, 256)
DTYPES = {torch.float16: "fp16", torch.float32: "fp32"}
CPU = torch.device("cpu")
"""Of tokens, besides bf16."""


class Scene(NamedTuple):
    """Launches that belong together.

    Parameters
    ----------
    name : str
        What the table calls it.
    launches : callable
        Returns them.
    """

    name: str
    launches: Callable[[], list[Launch]]


class Slot(NamedTuple):
    """The slots of one stream.

    Parameters
    ----------
    spec : str
        Of the method.
    value : bool
        Whether they are V's.
    dim : int
        Channels.
    dtype : torch.dtype
        Of dense tokens.
    """

    spec: str
    value: bool
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """What the table calls it."""
        flags = f" D={self.dim}" * (self.dim != 128) + f" {DTYPES.get(self.dtype, '')}"
        return f"{'V' if self.value else 'K'} {self.spec}{flags}".rstrip()

    def tokens(self, count: int) -> torch.Tensor:
        """Return tokens of zeros."""
        return torch.zeros(1, HEADS, count, self.dim, dtype=self.dtype, device="cpu")

    def encoding(self, tokens: int) -> list[Launch]:
        """Return what is launched to check tokens and to encode them."""
        codec = side(self.spec, self.value, self.dim)
        slots = SlotsOfZeros(codec, TOKENS)
        with recorded() as made:
            encoder = TritonEncoder(codec)
            encoder.write(encoder.prepare(self.tokens(tokens)), slots, 0)
        return made

    def behind(self, tokens: int) -> list[Launch]:
        """Return what is launched to encode tokens of a trellis where the device says."""
        taker, x = self.taker(tokens), self.tokens(tokens)
        table = torch.zeros(1, COLUMNS.value, dtype=torch.int64, device="cpu")
        with recorded() as made:
            encode_trellis(taker.codec, taker.taking.form, x, taker.slots, 0, table)
        return made

    def taker(self, tokens: int) -> Taker:
        """Return how so many tokens are taken in a step."""
        codec, x = side(self.spec, self.value, self.dim), self.tokens(tokens)
        form = slots_of(codec, x.device).known
        slots = SlotPlaces.of(form, [SlotsOfZeros(codec, TOKENS)], 1, x.device)
        return Taker(codec, slots, taking_of(codec, x, (K_SIDE, V_SIDE)[self.value]))

    def decoding(self, inverse: bool) -> list[Launch]:
        """Return what is launched to decode."""
        with recorded() as made:
            source = SlotsOfZeros(side(self.spec, self.value, self.dim), TOKENS)
            decode_triton(source, 0, 64, self.tokens(64), inverse)
        return made


def slots() -> Iterator[Slot]:
    """Iterate over formats, widths and dtypes."""
    for value in (False, True):
        yield from (Slot(spec, value) for spec in FORMATS)
        yield from (Slot(spec, value, dim) for spec in WIDE for dim in WIDTHS)
        yield from (Slot(FORMATS[0], value, 128, dtype) for dtype in DTYPES)


def encoding() -> Iterator[Scene]:
    """Iterate over what is encoded: prompts, single tokens, and tokens behind a captured step's."""
    for slot in slots():
        codec = side(slot.spec, slot.value, slot.dim)
        if slots_of(codec, CPU).encode_reason:
            continue
        counts = (max(codec.group, 64), codec.group)
        for tokens in dict.fromkeys(counts):
            yield Scene(f"encode {tokens} {slot.name}", partial(slot.encoding, tokens))
        if slots_of(codec, CPU).known.trellis is not None and codec.group == 1:
            yield Scene(f"encode 1 behind {slot.name}", partial(slot.behind, 1))


def taken(k: Slot, v: Slot, tokens: int) -> list[Launch]:
    """Return what is launched to take the tokens of a step."""
    takers = [slot.taker(tokens) for slot in (k, v)]
    table = torch.zeros(1, COLUMNS.value, dtype=torch.int64, device="cpu")
    flag = torch.ones(1, dtype=torch.bool, device="cpu")
    with recorded() as made:
        x, y = k.tokens(tokens), v.tokens(tokens)
        flags = sent_flags([(flag.data_ptr(), True, True)], flag.device)
        take(table, flags, takers, x, y, torch.cat([x] * 4, 1))
    return made


def taking() -> Iterator[Scene]:
    """Iterate over steps' tokens."""
    held = list(slots())
    for k, v in zip(held, held[len(held) // 2 :], strict=False):
        if any(slots_of(side(*slot[:3]), CPU).encode_reason for slot in (k, v)):
            continue
        plain = k.dim == 128 and k.dtype is torch.bfloat16
        for tokens in (1, 4) if k.spec in WIDE and plain else (1,):
            yield Scene(f"take {tokens} {k.name[2:]}", partial(taken, k, v, tokens))


def decoding() -> Iterator[Scene]:
    """Iterate over what is decoded, rotated back and not."""
    for slot in slots():
        codec = side(slot.spec, slot.value, slot.dim)
        if not slots_of(codec, CPU).reason:
            yield Scene(f"decode {slot.name}", partial(slot.decoding, True))
    for value in (False, True):
        slot = Slot(FORMATS[0], value)
        yield Scene(f"decode {slot.name} as stored", partial(slot.decoding, False))


def step(variant: Variant) -> list[Launch]:
    """Return what a step launches that is carried out on the device alone."""
    call = variant.call()
    runner = TritonStep(call, torch.ones((), dtype=torch.bool, device="cpu"))
    rows = []
    for x in (call.k, call.v):
        assert x is not None
        room = x.new_zeros(1, HEADS, 128, x.shape[3])
        rows.append(StepTokens(512, TokenMemory(room, 512), True, 576, 1, False))
    with recorded() as made:
        assert call.k is not None and call.v is not None
        runner.run([StepRow(runner, 576, *rows)], call.k, call.v, call.q)
    return made


def attention() -> Iterator[Scene]:
    """Iterate over calls, then steps with all that belongs to them."""
    for variant in (*steps(), *others()):
        yield Scene(variant.name, variant.launches)
    held = [Variant(FORMATS[0], dim) for dim in (128, *WIDTHS)]
    held += [Variant(FORMATS[0], dtype=dtype) for dtype in DTYPES]
    for variant in (*held, Variant("kivi:bits=2")):
        yield Scene(f"step {variant.name}", partial(step, variant))


def all_launches() -> Iterator[tuple[str, Launch]]:
    """Iterate over all that may be launched, each variant once, by its first scene's name."""
    known: set[str] = set()
    names: set[str] = set()
    for scene in itertools.chain(encoding(), decoding(), taking(), attention()):
        for launch in scene.launches():
            key = repr(launch)
            if key in known:
                continue
            known.add(key)
            name = f"{scene.name}: {launch.name}"
            again = (f"{name} {count}" for count in itertools.count(2))
            while name in names:
                name = next(again)
            names.add(name)
            yield name, launch
