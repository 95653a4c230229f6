"""What the compilers make of the kernels, for devices that are not here."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kvpact.kernels.triton import levels

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
    assert len([line for line in lines if line.startswith("sm_90")]) == 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_and_capability():
    assert "sm_100" in compiled()


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
