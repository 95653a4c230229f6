"""The tokens of a step: written down, checked, kept and encoded in one launch."""

from typing import NamedTuple

import pytest
import torch
from encode_compare import SEGMENT, codec_of, torch_slots

pytest.importorskip("triton")

from kvpact.kernels import ListSource
from kvpact.kernels.triton import columns
from kvpact.kernels.triton.forms import SlotPlaces, slots_of
from kvpact.kernels.triton.step.step import Taker, sent_flags, take, taking_of
from kvpact.testing.data import random_tokens
from kvpact.testing.held import same_bytes

KEPT, ROOM = 3, 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Side(NamedTuple):
    """A stream of two rows and heads that takes tokens, and where they are kept."""

    taker: Taker
    x: torch.Tensor
    segments: list[dict[str, torch.Tensor]]
    memory: torch.Tensor


class Given(NamedTuple):
    """What a launch is given."""

    table: torch.Tensor
    flags: list[tuple[torch.Tensor, bool, bool]]
    k: Side
    v: Side
    q: torch.Tensor

    def take(self) -> list[bool]:
        """Launch; return the flags."""
        sides = (self.k.taker, self.v.taker)
        flags = sent_flags([(good.data_ptr(), *kept) for good, *kept in self.flags], DEVICE)
        take(self.table, flags, sides, self.k.x, self.v.x, self.q)
        return [bool(good) for good, *_ in self.flags]


def given(specs, held, new, dtype=torch.float32, keeps=((True, True),) * 2) -> Given:
    """Return what two rows are given that hold so many tokens; `keeps`: of each, K's and V's."""
    table = torch.zeros(2, columns.COLUMNS.value, dtype=torch.int64)
    table[:, columns.HELD.value] = torch.tensor(held)
    sides = []
    for index, (spec, dim) in enumerate(zip(specs, (36, 20), strict=True)):
        codec = codec_of(spec, "kv"[index], dim, dtype)
        x = random_tokens(2, new, 2, dim, seed=index, dtype=dtype).to(DEVICE).transpose(1, 2)
        segments = [
            {f.name: f.allocate(2, 2, SEGMENT, DEVICE) for f in codec.fields}
            for _ in range((max(held) + new - 1) // SEGMENT + 1)
        ]
        form = slots_of(codec, x.device).known
        slots = SlotPlaces.of(form, [ListSource(tuple(segments), SEGMENT)], 2, x.device)
        memory = torch.full((2, 2, ROOM, dim), 7.0, dtype=dtype, device=DEVICE)
        side = (columns.K_SIDE, columns.V_SIDE)[index]
        tail = side.tail
        table[:, tail] = torch.tensor([row.data_ptr() for row in memory])
        for axis in (1, 2):
            table[:, tail + axis] = memory.stride(axis) * memory.itemsize
        exact_from = side.exact_from
        table[:, exact_from] = torch.tensor(held) - KEPT
        taker = Taker(codec, slots, taking_of(codec, x, side))
        sides.append(Side(taker, x, segments, memory))
    q = random_tokens(2, 6, new, 36, seed=2, dtype=dtype).to(DEVICE)
    flags = [(torch.ones((), dtype=torch.bool, device=DEVICE), *kept) for kept in keeps]
    return Given(table.to(DEVICE), flags, *sides, q)


@pytest.mark.parametrize(("specs", "held", "new", "dtype", "keeps"), [
    (("turboquant:bits=4", "int:bits=8,zero=true"), (3, 31), 1, torch.bfloat16, ((1, 1), (1, 1))),
    (("fp8", "turboquant:bits=3"), (127, 250), 3, torch.float16, ((0, 1), (1, 0))),
    (("int:bits=4", "fp8:scale=none"), (62, 200), 6, torch.float32, ((1, 0), (1, 1))),
    (("kivi:bits=2,group=32", "int:bits=8"), (40, 5), 2, torch.float32, ((1, 0), (1, 0))),
], ids=str)  # fmt: skip
def test_tokens_are_taken_behind_what_each_row_holds(specs, held, new, dtype, keeps):
    one = given(specs, held, new, dtype, keeps)
    assert one.take() == [True, True]
    places = (columns.K_NEW.value, columns.V_NEW.value)
    for index, (side, place) in enumerate(zip((one.k, one.v), places, strict=True)):
        x, size = side.x, side.x.itemsize
        for row, count in enumerate(held):
            wanted = [x[row].data_ptr(), x.stride(1) * size, x.stride(2) * size]
            assert one.table[row, place : place + 3].tolist() == wanted
            expected = side.memory[row].clone().fill_(7.0)
            if keeps[row][index]:
                expected[:, KEPT : KEPT + new] = x[row]
            assert torch.equal(side.memory[row], expected)
            if side.taker.codec.group > 1:  # encoded when it is whole
                assert not any(f[row].any() for found in side.segments for f in found.values())
                continue
            slots = torch_slots(side.taker.codec, x[row : row + 1], count)
            for segment, found in zip(slots, side.segments, strict=False):
                for name, numbers in segment.items():
                    assert same_bytes(numbers[0], found[name][row])


@pytest.mark.parametrize(("specs", "side", "number", "good"), [
    (("turboquant:bits=4", "int:bits=8"), "k", torch.nan, False),
    (("turboquant:bits=4", "int:bits=8"), "v", -torch.inf, False),
    (("turboquant:bits=4", "int:bits=8"), "q", torch.inf, False),
    (("turboquant:bits=4", "int:bits=8"), "q", 1e30, True),
    # The scale of so large a number is beyond fp16, and of a little less it is not.
    (("turboquant:bits=4", "int:bits=8"), "v", 8.4e6, False),
    (("turboquant:bits=4", "int:bits=8"), "v", 8.3e6, True),
    (("kivi:bits=2,group=32", "int:bits=8"), "k", 65_600.0, False),
    # The norm counts, not the number.
    (("turboquant:bits=4,center=64", "int:bits=8"), "k", 20_100.0, False),
    (("trellis:bits=4,first=false,weights=false,blocks=false", "fp8"), "k", 64_000.0, False),
], ids=str)  # fmt: skip
def test_a_flag_tells_of_a_row_that_can_not_be_stored(specs, side, number, good):
    one = given(specs, (40, 40), 2)
    x = one.q if side == "q" else getattr(one, side).x
    x[1, -1, 1, 5] = number
    assert one.take() == [True, good]
