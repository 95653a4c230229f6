"""What the compilers make of the kernels, for devices that are not here."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kvpact.kernels.triton import aot, levels
from kvpact.kernels.triton.forms import slots_of
from kvpact.kernels.triton.machine_code import Facts, Launch
from kvpact.kernels.triton.variants import side

TABLE = Path(__file__).parent / "golden" / "aot.json"


def compiled(*options: str) -> str:
    """Compile in a process where kernels are not interpreted."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvpact.kernels.triton.aot", "--check", str(TABLE), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_registers_copies_and_instructions():
    lines = compiled("--capability", "90", "--quick").splitlines()
    names = [line.split(" {")[0] for line in lines]
    for scene in aot.QUICK:
        kernel = "encode_tokens" if scene.startswith("encode") else "attend_digits"
        assert f"sm_90 {scene}: {kernel}" in names


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_and_capability():
    assert "sm_100" in compiled()


def test_bounds_are_held():
    form = slots_of(side("turboquant:bits=4", True, 128), True, torch.device("cpu")).form
    kernel = SimpleNamespace(__name__="attend_digits")
    launch = Launch(kernel, {}, {"G": 4, "V": form}, (), {})
    good = Facts(100, 0, 18000, 20.0, 48, 26, 32, 0, 77)
    assert aot.problems(launch, good, 90) == []
    for change in (
        {"stack": 8},
        {"registers": 201},
        {"instructions": 28.1},
        {"wide": 7},
        {"tensor": 0},
        {"moved": 1},
    ):
        assert len(aot.problems(launch, replace(good, **change), 90)) == 1
    encoder = launch._replace(kernel=SimpleNamespace(__name__="encode_tokens"))
    assert aot.problems(encoder, replace(good, fused=0), 90) == []
    assert aot.problems(encoder, replace(good, fused=1), 90) == ["1 fused or approximate"]


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
