"""Writes calls of the native library, with all memory they see, for `driver.cpp` to run again.

    python tests/kernels/record.py FILE

A file of cases: integers are unsigned, 64 bits, little-endian.

    "KVPCASE1", number of cases, cases
    case        operation (16 bytes) | label (112 bytes) | bound (double) | number of blocks, blocks
                | number of pointers, pointers; block 0 is the structure of arguments
    block       size | address modulo 64 | check: 0 input, 1 bytes, 2 fp32 within the bound
                | contents before the call | contents expected after it, where there is a check
    pointer     block | offset in it | block that it points into | offset in that one

What is expected is the torch body's. Pointers are told by what `Tensor.data_ptr` returned, so the
structures can change without this file.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compare  # first: it finds what it needs in tests/helpers
import decode_compare
import encode_compare
import learn_compare
import torch
from closeness import bound_of
from guards import guarded_outputs
from matrix import ATTENDED, UNTREATED
from torch import Tensor

from kvpact import CacheGeometry, create_cache
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import encode as encoder
from kvpact.kernels.cpu import library, slots, structs, trellis

INPUT, EQUAL, NEAR = range(3)
CHECKS = {
    "attend": {"out": NEAR},
    "attend_rows": {"out": NEAR},
    "encode": dict.fromkeys(("codes", "scale", "zero", "mean", "base", "step"), EQUAL),
    "learn": dict.fromkeys(("first", "weight", "order", "deviation"), EQUAL),
    "decode": {"out": EQUAL},
    "step": {"out": NEAR, "spare": EQUAL},
}
"""What an operation writes, by the names of the structure's fields."""


STEPS = (
    *("turboquant:bits=4", "turboquant:bits=3,window=5,sinks=3", "kivi:bits=2/int:bits=8"),
    "trellis:bits=3,first=false,weights=false,blocks=false",
)
TRELLISES = (
    *("trellis:bits=5", "trellis:bits=4", "trellis:bits=2,states=8"),
    f"trellis:bits=3,{UNTREATED}",
)


@dataclass
class Block:
    address: int
    contents: bytes
    check: int = INPUT
    expected: bytes = b""


@dataclass
class Case:
    operation: str
    blocks: list[Block]
    pointers: list[tuple[int, int, int, int]]
    label: str = ""
    bound: float = 0.0

    def written(self) -> list[Block]:
        return [block for block in self.blocks if block.check != INPUT]

    def expect_memory(self) -> None:
        """Take what the memory now holds for what is expected: callers compare it with torch's."""
        for block in self.written():
            block.expected = ctypes.string_at(block.address, len(block.contents))

    def expect(self, output: Tensor, bound: float) -> None:
        (block,) = [block for block in self.blocks if block.check == NEAR]
        block.expected, self.bound = output.float().contiguous().numpy().tobytes(), bound
        assert len(block.expected) == len(block.contents), self.label

    def packed(self) -> bytes:
        head = struct.pack("<16s112sd", self.operation.encode(), self.label.encode(), self.bound)
        parts = [head, struct.pack("<Q", len(self.blocks))]
        for block in self.blocks:
            parts.append(struct.pack("<QQQ", len(block.contents), block.address % 64, block.check))
            parts += [block.contents, block.expected]
        parts.append(struct.pack("<Q", len(self.pointers)))
        parts += [struct.pack("<QQQQ", *pointer) for pointer in self.pointers]
        return b"".join(parts)


@dataclass
class Recorder:
    """Copies calls while they are made, and all memory they can see."""

    cases: list[Case] = field(default_factory=list)
    _sizes: dict[int, int] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # so that no address is another's later

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Watch `data_ptr` and the library's functions."""
        original = Tensor.data_ptr

        def data_ptr(x: Tensor) -> int:
            address = original(x)
            if x.numel():
                last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
                size = (last + 1) * x.element_size()
                self._sizes[address] = max(size, self._sizes.get(address, 0))
                self._alive.append(x)
            return address

        found, real = library(), {name: getattr(library(), name) for name in CHECKS}
        # What was made earlier has pointers that were not seen.
        slots.SlotFormat.made.clear()
        encoder.CodecEncoder.made.clear()
        trellis.block_arguments.cache_clear()
        Tensor.data_ptr = data_ptr
        for name, call in real.items():
            setattr(found, name, self._watched(name, call))
        try:
            with guarded_outputs(native):
                yield self
        finally:
            Tensor.data_ptr = original
            for name, call in real.items():
                setattr(found, name, call)

    def _watched(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def watched(bit: int, given: Any, *rest: int) -> int:
            if isinstance(given, bytes):  # one structure after the other
                kind = structs.StepArgs if name == "step" else structs.AttendArgs
                found = [
                    kind.from_buffer_copy(given, place)
                    for place in range(0, len(given), ctypes.sizeof(kind))
                ]
            else:
                found = [given._obj]
            if name == "step":
                cases = [self._copied_steps(found)]
            else:
                cases = [self._copied(name, args) for args in found]
            status = call(bit, given, *rest)
            for case in cases:
                case.expect_memory()
            self.cases += cases
            return status

        return watched

    def _copied(self, operation: str, args: ctypes.Structure) -> Case:
        whole = Block(0, bytes(args))
        case = Case(operation, [whole], [])
        self._follow(case, 0, args, 0, 0, CHECKS[operation])
        return case

    def _copied_steps(self, rows: list[structs.StepArgs]) -> Case:
        """Copy the steps of a call, and their plans without what the steps say themselves."""
        case = Case("step", [Block(0, b"".join(map(bytes, rows)))], [])
        for row, args in enumerate(rows):
            place, size = row * ctypes.sizeof(args), ctypes.sizeof(structs.StepStruct)
            plan = structs.StepStruct.from_buffer_copy(ctypes.string_at(args.plan, size))
            attend = plan.attend
            attend.q = attend.out = args.plan = None
            for stream, append, store in ((attend.k, args.k, plan.k), (attend.v, args.v, plan.v)):
                stream.exact_from, store.form.tokens = (
                    append.exact_from,
                    append.start + append.tokens,
                )
                stream.tail.data = stream.fresh.data = store.form.x.data = None
                if append.exact_from == args.held:
                    append.tail.data = None  # there are no such tokens
            at = len(case.blocks)
            case.blocks.append(Block(0, bytes(plan)))
            case.pointers.append((0, place, at, 0))
            for side, store in (("k", plan.k), ("v", plan.v)):
                offset = getattr(structs.StepStruct, side).offset
                self._follow(case, at, store.form, offset, 0, CHECKS["encode"])
            self._follow(case, at, attend, 0, 0, {})
            self._follow(case, 0, args, place, 0, CHECKS["step"])
        return case

    def _follow(
        self,
        case: Case,
        block: int,
        part: ctypes.Structure,
        offset: int,
        segments: int,
        checks: dict[str, int],
    ) -> None:
        """Copy what the pointers of a structure at `offset` of a block point to."""
        segments = _segments(part) or segments
        for name, kind in part._fields_:
            at, value = offset + getattr(type(part), name).offset, getattr(part, name)
            check = checks.get(name, INPUT)
            if isinstance(value, structs.FieldStruct) and value.base:
                pointers = (ctypes.c_void_p * segments).from_address(value.base)
                table = len(case.blocks)
                case.blocks.append(Block(value.base, bytes(pointers)))
                case.pointers.append((block, at, table, 0))
                for index, pointer in enumerate(pointers):
                    self._point(case, table, 8 * index, pointer, check)
            elif isinstance(value, ctypes.Array):
                for index, item in enumerate(value):
                    place = at + index * ctypes.sizeof(item)
                    self._follow(case, block, item, place, segments, {})
            elif isinstance(value, ctypes.Structure) and not isinstance(value, structs.FieldStruct):
                written = checks if isinstance(value, structs.Append) else {}
                self._follow(case, block, value, at, segments, written)
            elif name == "trellis" and value:
                trellis = structs.TrellisStruct.from_address(value)
                case.pointers.append((block, at, len(case.blocks), 0))
                case.blocks.append(Block(value, bytes(trellis)))
                self._follow(case, len(case.blocks) - 1, trellis, 0, 0, {})
            elif kind is ctypes.c_void_p and value:
                self._point(case, block, at, value, check)

    def _point(self, case: Case, block: int, offset: int, pointer: int, check: int) -> None:
        # Views of a tensor were seen, too: the whole of it is wanted.
        known = [place for place in self._sizes.items() if 0 <= pointer - place[0] < place[1]]
        assert known, f"{case.operation}: {pointer:#x} is not known"
        begin, size = max(known, key=lambda place: place[1])
        place = (begin, size)
        places = [(other.address, len(other.contents)) for other in case.blocks]
        if place not in places:
            case.blocks.append(Block(begin, ctypes.string_at(begin, size), check))
            places.append(place)
        target = places.index(place)
        case.pointers.append((block, offset, target, pointer - begin))

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"KVPCASE1" + struct.pack("<Q", len(self.cases)))
            for case in self.cases:
                file.write(case.packed())


def _segments(part: ctypes.Structure) -> int:
    """Return how many segments the fields of a structure have; 0 where it does not say."""
    if hasattr(part, "slots"):
        return -(-part.last // part.slots.segment_tokens)
    size = getattr(part, "segment_tokens", 0)
    if not size:
        return 0
    if hasattr(part, "exact_from"):
        return -(-part.exact_from // size)
    return (part.start + part.tokens - 1) // size - part.start // size + 1


def record_attend(recorder: Recorder, **case: Any) -> None:
    """Record one call of `compare.both`: one step where it is one."""
    before = len(recorder.cases)
    expected, _, _ = compare.both(**case)
    bound = bound_of(case["spec"])
    if "dtype" in case:
        bound = torch.finfo(case["dtype"]).eps / 2  # what is expected was rounded to it
    attends = ("attend", "attend_rows", "step")
    made = [one for one in recorder.cases[before:] if one.operation in attends]
    for one, rows in zip(made, expected.chunk(len(made)), strict=True):
        one.label = " ".join(str(value) for value in case.values())[:111]
        one.expect(rows, bound)
    recorder.cases[before:] = made


def record_encode(
    recorder: Recorder, make: Callable[..., Any], spec: str, side: str, dim: int, *place: Any
) -> None:
    """Record one call of `encode_compare.compare` with the tokens that `make` makes."""
    before = len(recorder.cases)
    pieces, start = make(spec, side, dim, *place)
    assert encode_compare.compare(spec, side, pieces, start) == ""
    for one in recorder.cases[before:]:
        one.label = f"{spec} {side} {dim} {place}"


def record_learn(recorder: Recorder, case: learn_compare.Case) -> None:
    """Record the call of `learn_compare.compare`."""
    before = len(recorder.cases)
    assert learn_compare.compare(case) == ""
    for one in recorder.cases[before:]:
        one.label = str(case)[:111]


def record_decode(recorder: Recorder, spec: str, side: str, dim: int, *place: Any) -> None:
    """Record the calls of `decode_compare.compare`."""
    before = len(recorder.cases)
    assert decode_compare.compare(spec, side, dim, *place) == ""
    made = [one for one in recorder.cases[before:] if one.operation == "decode"]
    for one in made:
        one.label = f"{spec} {side} {dim} {place}"
    recorder.cases[before:] = made


def record_steps(recorder: Recorder, spec: str, layout: str = "contiguous", rows: int = 1) -> None:
    """Record steps of one call each; the tests compare such steps with the ordinary way."""
    before = len(recorder.cases)
    options = {"num_pages": 2 * rows, "page_size": 128} if layout == "paged" else {}
    cache = create_cache(spec, CacheGeometry(1, 2, 64, dtype=torch.float32), layout, **options)
    tokens = torch.randn(rows, 10, 134, 64, generator=torch.Generator().manual_seed(rows))
    cache.prefill(0, tokens[:, :2, :124], tokens[:, 2:4, :124])
    for k, v, q in (x.split((2, 2, 6), 1) for x in tokens[:, :, 124:].split(1, 2)):
        cache.attend(0, k=k.contiguous(), v=v.contiguous(), q=q.contiguous())
    made = [one for one in recorder.cases[before:] if one.operation == "step"]
    assert made, spec
    for one in made:
        one.label, one.bound = f"{spec} {layout} {rows}", bound_of(spec)
    recorder.cases[before:] = made


def record_all(recorder: Recorder) -> None:
    """Record all formats, and shapes and rules with edges."""
    mask = torch.arange(303).expand(1, 1, 3, 303) % 3 > 0
    for case in (
        *compare.cases(),
        *({"spec": spec} for spec in ("turboquant:bits=2", "int:bits=8,group=64")),
        {"spec": "turboquant:bits=4", "new": 3, "mask": mask, "softcap": 1.5},
        {"spec": "kivi:bits=2", "new": 16, "sink_logits": torch.linspace(-2, 4, 6)},
        {"spec": "turboquant:bits=2", "batch": 3, "padding": torch.tensor([0, 5, 140])},
        {"spec": "int:bits=4", "layout": "paged", "sliding_window": 40},
        {"spec": "turboquant:bits=3", "dtype": torch.float16, "held": 700},
        *({"spec": spec, "new": 21, "held": 270} for spec in ATTENDED),
        {"spec": "turboquant:bits=4", "dtype": torch.bfloat16, "held": 31},
        {"spec": "turboquant:bits=4", "held": 0, "new": 150, "sliding_window": 60},
        {"spec": "none", "held": 0, "new": 70, "dim": 36, "value_dim": 100, "batch": 2},
        {"spec": "int:bits=4", "held": 0, "new": 33, "dtype": torch.float16},
        *({"spec": spec, "backend": "auto", "held": 200} for spec in TRELLISES),
        {"spec": TRELLISES[0], "backend": "auto", "new": 21, "held": 200, "dim": 32},
        *({"spec": "turboquant:bits=4", "offset": 9.0, "new": new} for new in (1, 21)),
    ):
        record_attend(recorder, **case)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for groups, spec in ((2, "turboquant:bits=4"), (3, "turboquant:bits=8"), (7, "int:bits=4")):
        # Heads don't divide by the threads, so these share the tokens of a head.
        record_attend(recorder, spec=spec, heads=3, held=4500, groups=groups)
    torch.set_num_threads(threads)
    for spec in STEPS:
        record_steps(recorder, spec)
        record_steps(recorder, spec, "paged", 3)
    widths = itertools.cycle((20, 33, 64, 80, 128))
    for spec, place, side in itertools.product(encode_compare.FORMATS, encode_compare.PLACES, "kv"):
        record_encode(recorder, encode_compare.random_pieces, spec, side, next(widths), *place)
    for case in encode_compare.trellis_cases():
        record_encode(recorder, encode_compare.treated_pieces, *case)
    for case in itertools.islice(learn_compare.cases(), 0, None, 11):
        record_learn(recorder, case)
    dtypes = itertools.cycle(decode_compare.DTYPES)
    combinations = itertools.product(decode_compare.FORMATS, decode_compare.PLACES, "kv")
    for spec, place, side in itertools.islice(combinations, 0, None, 7):
        record_decode(recorder, spec, side, next(widths), *place, next(dtypes))


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    with Recorder().recording() as recorder:
        record_all(recorder)
    recorder.write(options.file)
    print(f"{len(recorder.cases)} cases, {options.file.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
