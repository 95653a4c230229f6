"""What the compilers say of a kernel: ahead of time, for devices that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpact.kernels.triton.forms import NUMBERS

# Rounding to whole numbers (cvt) takes subnormal numbers for zeros, and changes no others.
_FUSED = r"fma\.rn|div\.full|\.approx|^\s*(?!cvt)\S*\.ftz"
_OTHERS = {torch.int64: "i64", torch.int16: "i16", torch.bool: "i1"}
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
    fused : int
        Fused multiply-adds, and divisions and roots that are not rounded correctly, in PTX.
    instructions : float
        Of a warp, a token: those of the largest loop. This and what follows are 0 where they are
        not asked for.
    wide, narrow : int
        Copies into shared memory of 16 bytes a thread, and of fewer.
    tensor : int
        Tensor-core instructions in the loop.
    moved : int
        Left operands of products that pass through shared memory after they were decoded.
    """

    registers: int
    stack: int
    shared: int
    fused: int
    instructions: float = 0.0
    wide: int = 0
    narrow: int = 0
    tensor: int = 0
    moved: int = 0

    def to_json(self) -> dict[str, int | float]:
        """Return the numbers by name, but for zeros."""
        return {name: number for name, number in asdict(self).items() if number}


class Launch(NamedTuple):
    """A launch that was taken down.

    Parameters
    ----------
    kernel : JITFunction
        The kernel.
    types : dict
        Of its parameters: "constexpr" for constants.
    constants : dict
        What they are.
    aligned : tuple of int
        Parameters that are multiples of 16.
    options : dict
        Warps, stages and the like.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Take launches down instead of carrying them out; tensors may lie anywhere."""
    made: list[Launch] = []
    run = triton.JITFunction.run

    def taken_down(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        made.append(_launch(kernel, given, named))

    triton.JITFunction.run = taken_down
    try:
        yield made
    finally:
        triton.JITFunction.run = run


def _launch(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launch:
    """Return what a launch would compile: constants, types, and which numbers are multiples."""
    own = {name: value for name, value in named.items() if name in kernel.arg_names}
    options = {name: value for name, value in named.items() if name not in own}
    bound = kernel.signature.bind(*given, **own)
    bound.apply_defaults()
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for index, (parameter, value) in enumerate(
        zip(kernel.params, bound.arguments.values(), strict=True)
    ):
        name, special = parameter.name, not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and _is_one(value)):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = _type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if special and isinstance(number, int) and number % 16 == 0:
            aligned.append(index)
    return Launch(kernel, types, constants, tuple(aligned), options)


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + (NUMBERS | _OTHERS)[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "fp32"


def compiled(launch: Launch, capability: int) -> Any:
    """Compile what a launch would, for a compute capability: 80, 89, 90, 100."""
    aligned = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.types), dict(launch.constants), aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=dict(launch.options))


def facts(made: Any, tokens: int = 0, columns: int = 0) -> Facts:
    """Return what is known of a compiled kernel.

    Parameters
    ----------
    made : CompiledKernel
        From `compiled`.
    tokens : int
        That one pass of its largest loop attends; 0 to look into no loop: that takes a second.
    columns : int
        Columns of its products' right operands.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name) if tokens else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    fused = len(re.findall(_FUSED, made.asm["ptx"], re.MULTILINE))
    known = Facts(int(found[1]), int(found[2]), made.metadata.shared, fused)
    if not tokens:
        return known
    loop = _largest_loop(text)
    wide = len(re.findall(r"LDGSTS\.E\.BYPASS\.128", text))
    return replace(
        known,
        instructions=round(len(loop) * made.metadata.num_warps / tokens, 2),
        wide=wide,
        narrow=len(re.findall(r"LDGSTS", text)) - wide,
        tensor=sum(bool(re.search(r"\b[IHQ]G?MMA", line)) for line in loop),
        moved=_moved(made.asm["ttgir"], columns),
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
