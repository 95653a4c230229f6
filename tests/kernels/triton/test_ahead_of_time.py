"""What the compilers make of the kernels, for devices that are not here."""

import ast
import importlib
import inspect
import itertools
import os
import pkgutil
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import aot
from bounds import BOUNDS
from scenes import FORMATS
from variants import side

import kvpact.kernels.triton as triton_kernels
from kvpact.kernels.triton.digits import levels
from kvpact.kernels.triton.forms import slots_of
from kvpact.methods import Codec
from kvpact.testing.specs import example_specs

TABLE = Path(__file__).parent / "golden" / "aot.json"


def said(*options: str) -> list[str]:
    """What a process says in which kernels are not interpreted."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, aot.__file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def kernel_of(name: str) -> str:
    return name.split(": ")[1].split()[0]


def launched() -> set[str]:
    """Names of the kernels that no other one calls."""
    kernels, called = set[str](), set[str]()
    for module in pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        source = importlib.import_module(module.name)
        for name, found in vars(source).items():
            if type(found).__name__ in ("JITFunction", "InterpretedFunction"):
                kernels.add(name)
                names = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(found.fn))))
                calls = [node.func for node in names if isinstance(node, ast.Call)]
                called |= {call.id for call in calls if isinstance(call, ast.Name)}
    # One of the encoders' is called, and one of the trellises' launched.
    return kernels - called | {"store_codes"}


@pytest.fixture(scope="module")
def listed() -> list[str]:
    return said("--list")


def test_kernels_are_within_bounds_and_as_the_table_says():
    lines = said("--capability", "90", "--quick", "--check", str(TABLE))
    names = {line.split(" {")[0] for line in lines if line.startswith("sm_90 ")}
    assert names == {f"sm_90 {name}" for name in aot.QUICK}


def test_each_kernel_is_compiled_each_time():
    assert {kernel_of(name) for name in aot.QUICK} == launched()


def test_the_table_holds_what_dispatch_may_choose(listed):
    table = aot.read(TABLE)
    assert sorted(table["sm_90"]) == sorted(listed)
    for place in table.keys() - {"triton", "sm_90"}:
        assert {*table[place]} <= {*listed}
    assert {kernel_of(name) for name in listed} == launched() == {*BOUNDS, "attend_digits"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_and_capability():
    assert any(line.startswith("sm_100") for line in said("--check", str(TABLE)))


def kind(codec: Codec) -> tuple[object, ...]:
    """What makes kernels take other ways, but for widths of codes and vectors."""
    known = slots_of(codec, torch.device("cpu"))
    slots, written = known.form, known.written
    held = slots and (slots.kind, slots.order, *map(bool, slots.types), slots.shift_scaled)
    scales = slots and (slots.channels < slots.dim, bool(slots.middle), slots.group > 1)
    book = written and written.encoder == "codebook"
    rule = written and (written.encoder, written.rule if book else written.levels.number)
    return held, scales, rule and (*rule, written.group > 1)


def test_every_method_has_a_kind_of_slots_that_is_compiled():
    sides = itertools.product(FORMATS, (False, True))
    known = {kind(side(spec, value, 128)) for spec, value in sides}
    known.add((None, None, None))  # torch's alone
    for spec, value in itertools.product(example_specs(), (False, True)):
        assert kind(side(spec, value, 128)) in known, (spec, value)


def prmt(low: int, high: int, selector: int) -> int:
    """PTX's definition of prmt.b32, in its default mode."""
    data = (high << 32 | low).to_bytes(8, "little")
    out = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = data[nibble & 7]
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        out |= byte << (8 * i)
    return out


def test_constants_of_the_assembly():
    source = Path(levels.__file__).read_text()
    upper, lower = (int(text, 16) for text in re.findall(r"\$2, (0x[0-9a-f]+);", source))
    numbers = random.Random(0)
    for word in [numbers.getrandbits(32) for _ in range(2000)]:
        shifted = word << 4 & 0xFFFFFFFF
        top = [0xFF if word >> (4 * i + 3) & 1 else 0 for i in range(8)]
        assert prmt(word, shifted, lower).to_bytes(4, "little") == bytes(top[:4])
        assert prmt(word, shifted, upper).to_bytes(4, "little") == bytes(top[4:])
