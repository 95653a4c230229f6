"""Copies calls of the native library, with all memory they see, into a file for `driver.cpp`.

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

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guards import guarded_outputs
from torch import Tensor

from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu import encode as encoder
from kvpact.kernels.cpu import library, slots, structs, trellis

INPUT, EQUAL, NEAR = range(3)
CHECKS = {
    "attend": {"out": NEAR},
    "attend_rows": {"out": NEAR},
    "encode": dict.fromkeys(("codes", "scale", "zero", "mean", "base", "step"), EQUAL),
    "prompt": dict.fromkeys(("state", "numbers", "k_tail", "v_tail", "k_sinks", "v_sinks"), EQUAL),
    "decode": {"out": EQUAL},
    "step": {"out": NEAR, "spare": EQUAL},
    "scan": {"out": NEAR},
    "gather": {"out": EQUAL},
}
"""What an operation writes, by the names of the structure's fields."""


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
    def recording(self) -> Iterator["Recorder"]:
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
        def watched(*words: Any) -> int:
            given = words[0 if name == "gather" else 1]
            if isinstance(given, bytes):  # one structure after the other
                kinds = {"step": structs.StepArgs, "prompt": structs.PromptArgs}
                kind = kinds.get(name, structs.AttendArgs)
                found = [
                    kind.from_buffer_copy(given, place)
                    for place in range(0, len(given), ctypes.sizeof(kind))
                ]
            else:
                found = [given._obj]
            if name == "step":
                cases = [self._copied_steps(found)]
            elif name == "prompt":
                cases = [self._copied_prompt(found[0])]
            else:
                cases = [self._copied(name, args) for args in found]
            status = call(*words)
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

    def _copied_prompt(self, args: structs.PromptArgs) -> Case:
        """Copy first tokens of a layer; in the plan, numbers stand in the place of addresses."""
        case, kind = Case("prompt", [Block(0, bytes(args))], []), structs.PromptArgs
        plan = ctypes.string_at(args.plan, ctypes.sizeof(structs.PromptPlan))
        known, shown = (
            structs.PromptPlan.from_buffer_copy(plan),
            structs.PromptPlan.from_buffer_copy(plan),
        )
        for name in ("first", "weight", "order", "deviation"):
            setattr(shown.learn, name, None)
        tables = []
        for side, encoding in (("k", shown.k), ("v", shown.v)):
            rows = 0
            for name, member in encoding._fields_:
                if member is structs.FieldStruct:
                    rows = max(rows, getattr(encoding, name).base or 0)
                    getattr(encoding, name).base = None
            tables.append((f"{side}_table", rows * getattr(known, f"{side}_segments")))
        case.blocks.append(Block(args.plan, plan))
        case.pointers.append((0, kind.plan.offset, 1, 0))
        self._follow(case, 1, shown, 0, 0, {})
        for name, count in tables:
            if not count:
                continue
            pointers = (ctypes.c_void_p * count).from_address(getattr(args, name))
            case.pointers.append((0, getattr(kind, name).offset, len(case.blocks), 0))
            case.blocks.append(Block(getattr(args, name), bytes(pointers)))
            table = len(case.blocks) - 1
            for index, pointer in enumerate(pointers):
                self._point(case, table, 8 * index, pointer, EQUAL)
        if args.known:
            case.pointers.append((0, kind.known.offset, len(case.blocks), 0))
            trellis = ctypes.string_at(args.known, ctypes.sizeof(structs.TrellisStruct))
            case.blocks.append(Block(args.known, trellis))
        rest = structs.PromptArgs.from_buffer_copy(bytes(args))
        rest.plan = rest.k_table = rest.v_table = rest.known = None
        self._follow(case, 0, rest, 0, 0, CHECKS["prompt"])
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
            elif name == "places":  # an array of ctypes
                case.pointers.append((block, at, len(case.blocks), 0))
                case.blocks.append(Block(value, ctypes.string_at(value, 8 * part.inside)))
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
    if isinstance(part, structs.GatherArgs):
        items = (ctypes.c_int64 * part.count).from_address(part.items)
        return max(items) // part.inside // part.segment_units + 1
    if hasattr(part, "slots"):
        return -(-part.last // part.slots.segment_tokens)
    size = getattr(part, "segment_tokens", 0)
    if not size:
        return 0
    if hasattr(part, "exact_from"):
        return -(-part.exact_from // size)
    return (part.start + part.tokens - 1) // size - part.start // size + 1
