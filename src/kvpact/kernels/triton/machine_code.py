"""What the compilers say of a kernel: ahead of time, for devices that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Facts:
    """What is known of a compiled kernel.

    Parameters
    ----------
    registers : int
        Of a thread.
    stack : int
        Bytes of a thread: what did not fit into registers.
    shared : int
        Bytes of shared memory.
    instructions : float
        Of a warp, a token: those of the largest loop. 0 where a kernel is not asked for them.
    wide, narrow : int
        Copies into shared memory of 16 bytes a thread, and of fewer.
    tensor : int
        Tensor-core instructions in the loop.
    moved : int
        Left operands of products that pass through shared memory after they were decoded.
    fused : int
        Fused multiply-adds, and divisions and roots that are not rounded correctly, in PTX.
    """

    registers: int
    stack: int
    shared: int
    instructions: float
    wide: int
    narrow: int
    tensor: int
    moved: int
    fused: int

    def to_json(self) -> dict[str, int | float]:
        """Return the numbers by name."""
        return asdict(self)


def compiled(
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    numbers: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Compile a kernel as a launch would.

    Parameters
    ----------
    kernel : JITFunction
        The kernel.
    pointers : mapping
        Types of pointers, by parameter; all of them aligned to 16 bytes.
    constants : mapping
        Compile-time constants.
    capability : int
        Compute capability: 80, 89, 90, 100.
    numbers : mapping, optional
        Types of other parameters that are not i32.
    **options
        Of the launch.
    """
    types: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in pointers:
            types[name] = pointers[name]
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            types[name] = (numbers or {}).get(name, "i32")
    source = ASTSource(kernel, types, dict(constants), aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(made: Any, tokens: int = 0, columns: int = 0) -> Facts:
    """Return what is known of a compiled kernel.

    Parameters
    ----------
    made : CompiledKernel
        From `compiled`.
    tokens : int
        That one pass of its largest loop attends; 0 to count no instructions.
    columns : int
        Columns of its products' right operands.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    loop = _largest_loop(text)
    wide = len(re.findall(r"LDGSTS\.E\.BYPASS\.128", text))
    return Facts(
        int(found[1]),
        int(found[2]),
        made.metadata.shared,
        round(len(loop) * made.metadata.num_warps / tokens, 2) if tokens else 0.0,
        wide,
        len(re.findall(r"LDGSTS", text)) - wide,
        sum(bool(re.search(r"\b[IHQ]G?MMA", line)) for line in loop),
        _moved(made.asm["ttgir"], columns),
        len(re.findall(r"fma\.rn|div\.full|\.approx|\.ftz", made.asm["ptx"])),
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _largest_loop(text: str) -> list[str]:
    """Return the instructions of the largest loop of a disassembly."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    best: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1].strip())
            back = re.search(r"BRA.*?`?\(?(\.L_x?_?\w+)\)?", lines[-1])
            if back and back[1] in labels:
                best = max(best, lines[labels[back[1]] :], key=len)
    return best


def _moved(text: str, columns: int) -> int:
    """Count operands that are stored to shared memory, or moved between threads, after decoding.

    Right operands are: queries once, and weights, which have to change threads.
    """
    stored = re.findall(r"local_alloc %.*tensor<\d+x(\d+)x(?:i8|f16)", text)
    between = re.findall(r"convert_layout .*-> .*dot_op<\{opIdx = 0", text)
    return sum(int(width) != columns for width in stored) + len(between)
