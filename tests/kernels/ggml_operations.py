"""Compares operations of the library for llama.cpp with numpy in fp64, through ggml's interface.

    python tests/kernels/ggml_operations.py LIBRARY GGML [LIBGGML_CPU]

GGML is fake_ggml.cpp, compiled. Given ggml's own CPU library, the program compares errors with
those of ggml's operations: they may be 5 percent more, or the rounding of fp32.
"""

import ctypes
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Kind

BLOCK = 32
NAMES = ("f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "bf16")
KINDS = {name: Kind[name.upper()] for name in NAMES}
NUMBERS = ("f32", "f16", "bf16")
LEAST = ("q4_1", "q5_1")


def row_bytes(kind: str, dim: int) -> int:
    """Return the bytes of a row."""
    block, size = GGML_QUANT_SIZES[KINDS[kind]]
    return dim // block * size


class Tensor(ctypes.Structure):
    """ggml's tensor."""


NUMBER, POINTER, BOOL = ctypes.c_int32, ctypes.c_void_p, ctypes.c_bool
Tensor._fields_ = [
    ("type", NUMBER), ("buffer", POINTER), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
    ("op", NUMBER), ("params", ctypes.c_float * 16), ("flags", NUMBER),
    ("src", ctypes.POINTER(Tensor) * 10), ("view_src", POINTER), ("view_offset", ctypes.c_size_t),
    ("data", POINTER), ("name", ctypes.c_char * 64), ("extra", POINTER),
    ("padding", ctypes.c_char * 8),
]  # fmt: skip


def stored(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random rows of a type: bytes, of which the last axis is a row."""
    *rows, dim = shape
    if kind in NUMBERS:
        x = rng.standard_normal(shape).astype(np.float32)
        return quants.quantize(x, KINDS[kind]).view(np.uint8)
    blocks = (*rows, dim // BLOCK)
    data = rng.integers(0, 256, (*blocks, row_bytes(kind, BLOCK)), np.uint8)
    some = rng.uniform(-1, 1, (*blocks, 2 if kind in LEAST else 1))
    units = (some / (64 if kind in ("q8_0", "iq4_nl") else 8)).astype(np.float16).view(np.uint8)
    data[..., : units.shape[-1]] = units
    return data.reshape(*rows, -1)


def numbers(kind: str, data: np.ndarray) -> np.ndarray:
    """Return what rows hold, by the package gguf."""
    return quants.dequantize(np.ascontiguousarray(data), KINDS[kind]).astype(float)


@dataclass
class Case:
    """An operation: its types and its shape."""

    k: str
    v: str
    dim: int
    v_dim: int
    heads: int
    groups: int
    tokens: int
    queries: int
    streams: int = 1
    shared: int = 1  # streams to one of K and V
    mask: bool = True
    sinks: bool = False
    bias: float = 0
    softcap: float = 0
    inner: bool = True  # a token's heads lie side by side
    threads: int = 1
    sequences: int = 0  # that share the cells; some are free and hold NaN, and one sequence has one


class Operation:
    """A case with its data, and its result in fp64."""

    def __init__(self, case: Case, seed: int) -> None:
        rng = np.random.default_rng(seed)
        c, self.case, self.kept = case, case, []
        heads = c.heads * c.groups
        self.scale = c.dim**-0.5
        self.q = rng.standard_normal((c.streams, heads, c.queries, c.dim)).astype(np.float32) * 2
        order = c.streams // c.shared, *((c.tokens, c.heads) if c.inner else (c.heads, c.tokens))
        view = lambda x: x.transpose(0, 2, 1, 3) if c.inner else x  # noqa: E731
        self.keys = view(stored(rng, c.k, (*order, c.dim)))
        same = c.k == c.v and c.dim == 576  # V is a view of K, as in MLA
        width = row_bytes(c.v, c.v_dim)
        self.values = self.keys[..., :width] if same else view(stored(rng, c.v, (*order, c.v_dim)))
        self.seen = rng.standard_normal((c.streams, 1, c.queries, c.tokens)).astype(np.float16)
        self.seen[rng.random(self.seen.shape) < 0.4] = -np.inf
        self.seen[..., c.tokens // 2 :][..., : c.tokens // 4] = -np.inf  # whole tiles in long ones
        if c.queries > 1:
            self.seen[:, :, c.queries // 2, :] = -np.inf  # a row that sees nothing
        if c.sequences:
            cell = np.arange(c.tokens)
            owner = np.where(cell < c.tokens // 2, cell // 37, cell) % c.sequences
            owner[(owner == 0) | (rng.random(c.tokens) < 0.1)] = -1
            owner[-2], self.seen[..., -2] = 0, 0
            row = np.arange(c.queries) * c.sequences // c.queries
            self.seen[..., owner != row[:, None]] = -np.inf
            self.keys[:, :, owner < 0] = self.values[:, :, owner < 0] = 255
        self.sink = rng.standard_normal(heads).astype(np.float32)

    def expected(self, coded: bool) -> np.ndarray:
        """Return the result; `coded`: queries are rounded to 8 bits for quantised keys."""
        c, q = self.case, self.q
        rounded = q.astype(float)
        if coded and c.k not in NUMBERS:
            blocks = q.reshape(*q.shape[:-1], -1, BLOCK)
            top = np.abs(blocks).max(-1, keepdims=True)
            codes = np.rint(blocks * (np.float32(127) / top))
            unit = (top / 127).astype(np.float16).astype(float)
            rounded = (codes * unit).reshape(q.shape)
        heads = np.arange(c.heads * c.groups)
        at = np.ix_(np.arange(c.streams) // c.shared, heads // c.groups)
        k, v = (np.nan_to_num(numbers(*x)) for x in ((c.k, self.keys), (c.v, self.values)))
        s = rounded @ k[at].swapaxes(-1, -2)
        s *= self.scale
        if c.softcap:
            s = c.softcap * np.tanh(s / c.softcap)
        low = 2 ** int(np.log2(len(heads)))
        up = np.where(heads < low, heads + 1.0, (2 * (heads - low) + 1) / 2)
        slope = 2.0 ** (-c.bias / low * up) if c.bias else np.ones(len(heads))
        if c.mask:
            s += slope[:, None, None] * self.seen.astype(float)
        sink = np.broadcast_to(self.sink[:, None, None], (*s.shape[:-1], 1))
        if not c.sinks:
            sink = np.full(sink.shape, -np.inf)
        s = np.concatenate([s, sink], -1)
        top = s.max(-1, keepdims=True)
        w = np.exp(s - np.where(np.isinf(top), 0, top))
        total = w.sum(-1, keepdims=True)
        w = np.divide(w, total, out=np.zeros_like(w), where=total > 0)[..., :-1]
        return (w @ v[at]).swapaxes(1, 2)

    def tensor(self, x: np.ndarray, kind: str, dim: int) -> Tensor:
        """Return ggml's tensor of an array [stream, head, row, bytes or numbers]."""
        t = Tensor(type=KINDS[kind], data=x.ctypes.data)
        t.ne[:] = dim, x.shape[2], x.shape[1], x.shape[0]
        t.nb[:] = GGML_QUANT_SIZES[KINDS[kind]][1], x.strides[2], x.strides[1], x.strides[0]
        self.kept.append(t)
        return t

    def node(self) -> tuple[Tensor, np.ndarray]:
        """Return the operation as a tensor, and its output, all NaN."""
        c, heads = self.case, self.case.heads * self.case.groups
        out = np.full((c.streams, c.queries, heads, c.v_dim), np.nan, np.float32)
        op = self.tensor(out, "f32", c.v_dim)
        op.op, op.flags = 74, 16
        op.params[:3] = self.scale, c.bias, c.softcap
        sources = [(self.q, "f32", c.dim), (self.keys, c.k, c.dim), (self.values, c.v, c.v_dim)]
        sources += [(self.seen, "f16", c.tokens) if c.mask else None]
        sources += [(self.sink.reshape(1, 1, 1, -1), "f32", heads) if c.sinks else None]
        for i, source in enumerate(sources):
            if source is not None:
                op.src[i] = ctypes.pointer(self.tensor(*source))
        return op, out


class Ggml:
    """A ggml, and graphs of single operations."""

    class Params(ctypes.Structure):
        """What memory a graph has."""

        _fields_ = (("size", ctypes.c_size_t), ("buffer", POINTER), ("no_alloc", ctypes.c_bool))

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)

    def call(self, name: str, *arguments: object, result: type | None = POINTER) -> object:
        """Call a function of ggml."""
        function = getattr(self.lib, f"ggml_{name}")
        function.restype = result
        return function(*(POINTER(a) if isinstance(a, int) else a for a in arguments))

    def compute(self, op: Tensor, by: Callable[[int, int], int]) -> None:
        """Compute a graph of an operation by a function of its context and it."""
        context = self.call("init", self.Params(1 << 26, None, False))
        graph = self.call("new_graph", context)
        self.call("build_forward_expand", graph, ctypes.byref(op), result=None)
        assert by(context, graph) == 0
        self.call("free", context, result=None)


class Library(Ggml):
    """The backend, as ggml calls it."""

    def __init__(self, path: str, ggml: str) -> None:
        super().__init__(ggml)
        found = self.call("backend_load", path.encode())
        assert found, "refused"
        self.device = self.call("backend_reg_dev_get", found, ctypes.c_size_t(0))
        self.backend = self.call("backend_dev_init", self.device, None)
        self.set = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(
            self.call("backend_reg_get_proc_address", found, b"ggml_backend_set_n_threads")
        )

    def takes(self, op: Tensor) -> bool:
        """Return whether the backend computes an operation."""
        return self.call("backend_dev_supports_op", self.device, ctypes.byref(op), result=BOOL)

    def __call__(self, operation: Operation) -> np.ndarray:
        """Compute an operation."""
        op, out = operation.node()
        assert self.takes(op), operation.case
        self.set(self.backend, operation.case.threads)
        by = lambda _, g: self.call(  # noqa: E731
            "backend_graph_compute_async", self.backend, g, result=NUMBER
        )
        self.compute(op, by)
        return out


class Processor(Ggml):
    """The same operations by ggml's CPU backend."""

    def __call__(self, operation: Operation) -> np.ndarray:
        """Compute an operation."""
        op, out = operation.node()
        one = ctypes.c_int(1)
        self.compute(op, lambda c, g: self.call("graph_compute_with_ctx", c, g, one, result=NUMBER))
        return out


SHAPES = [
    {"heads": 2, "groups": 3, "tokens": 300, "queries": 1, "threads": 2},
    {"heads": 1, "groups": 4, "tokens": 17, "queries": 3, "mask": False, "softcap": 2.0},
    {"heads": 3, "groups": 1, "tokens": 129, "queries": 35, "sinks": True, "inner": False,
     "threads": 3},
    {"heads": 2, "groups": 6, "tokens": 577, "queries": 1, "bias": 8.0, "streams": 2, "shared": 2,
     "threads": 2},
    {"heads": 1, "groups": 20, "tokens": 64, "queries": 6, "bias": 4.0, "sinks": True,
     "streams": 2},
    {"heads": 2, "groups": 1, "tokens": 1, "queries": 2, "mask": False},
    {"heads": 2, "groups": 2, "tokens": 1024, "queries": 75, "threads": 2},
]  # fmt: skip
SERVED = [
    {"heads": 3, "groups": 3, "tokens": 700, "queries": 8, "sequences": 8, "threads": 2},
    {"heads": 1, "groups": 4, "tokens": 300, "queries": 75, "sequences": 8, "threads": 2},
    {"heads": 3, "groups": 3, "tokens": 600, "queries": 1, "streams": 8, "threads": 2},
]
WIDTHS = [(64, 64), (96, 32), (32, 160), (256, 128), (576, 512)]
ODD = [(40, 80), (72, 8), (120, 72)]


def cases() -> list[Case]:
    """Return every pair of types, each with a shape or two; and odd widths of numbers."""
    found = []
    for i, (k, v) in enumerate(itertools.product(KINDS, KINDS)):
        found.append(Case(k, v, *WIDTHS[(i + i // 9) % 4], **SHAPES[(i + i // 9) % 6]))
    for i, k in enumerate(KINDS):
        found.append(Case(k, k, *WIDTHS[i % 5], **SHAPES[-1]))
        found.append(Case(k, k, *WIDTHS[4], **SHAPES[i % 6]))
        found += [Case(k, NAMES[i - j], *WIDTHS[(i + j) % 4], **x) for j, x in enumerate(SERVED)]
    for i, (k, v) in enumerate(itertools.product(NUMBERS, NUMBERS)):
        found.append(Case(k, v, *ODD[i % 3], **SHAPES[i % 6]))
    return found


def distance(x: np.ndarray, exact: np.ndarray) -> float:
    """Return the mean square of the error over that of the result."""
    assert np.isfinite(x).all()
    return float(((x - exact) ** 2).sum() / (exact**2).sum())


def main(library: str, ggml: str, cpu: str | None = None) -> int:
    """Print each operation that is wrong; return how many are."""
    ours, theirs, wrong = Library(library, ggml), Processor(cpu) if cpu else None, 0
    for seed, case in enumerate(cases()):
        if theirs and case.shared > 1:
            continue  # ggml's own operation refuses that K has fewer streams
        operation = Operation(case, seed)
        result, exact = ours(operation), operation.expected(False)
        error, most = distance(result, exact), 1e-8
        if theirs:
            most = 1.05 * distance(theirs(operation), exact) + 1e-12
        elif error > most:  # with whole numbers, which is right where they are used
            error = distance(result, operation.expected(True))
        if not error <= most:
            print(f"{error:.3g} > {most:.3g}", case)
            wrong += 1
        elif theirs:
            print(f"{error:.3g} {most:.3g}", case.k, case.v, case.queries, case.tokens)
    print(len(cases()), "operations", wrong, "wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
