"""Caches by the Triton kernels beside the torch bodies, on a GPU or interpreted.

    python tools/gpu_day/gpu_compare.py smoke|formats [--only TEXT] [--out DIR]

Two caches take the same tokens, in the same pieces: attention agrees within a bound, packed bytes
and decoded numbers agree to the bit. *smoke* launches every kernel, and ends with the first case
that is wrong; *formats* goes on. What is wrong is written to DIR, with all that makes it again.
`tools/gpu_day.sh` sets what is imported from where.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aot import QUICK
from launches import Launches
from scenes import FORMATS
from torch import Tensor

from kvpact import AttendConfig, CacheGeometry, create_cache, parse_spec, units
from kvpact.cache.paged.view import PagedView
from kvpact.kernels import BACKENDS
from kvpact.kernels.triton.backend import TritonBackend, installed
from kvpact.kernels.triton.digits import fast

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BOUNDS = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Of the norm of the difference over the norm, as in tests/kernels/triton."""
KERNELS = {name.split(": ")[1] for name in QUICK}
SETTINGS = ("PYTHONPATH", "TRITON_INTERPRET")
# A search through few states, which is quickly interpreted.
TRELLIS = "trellis:bits=2,states=8"


@dataclass(frozen=True)
class Case:
    """Pieces of tokens that two caches take.

    Parameters
    ----------
    spec : str
        Of the caches.
    pieces : tuple of int
        Tokens of each call.
    dim, heads, groups, batch : int
        Width, KV heads, query heads of a KV head, rows.
    dtype : torch.dtype
        Of tokens.
    page : int
        Tokens of a page; 0 for a contiguous cache.
    padding : tuple of int
        Of the rows of the first piece.
    window : int
        Of a sliding window; 0 for none.
    """

    spec: str
    pieces: tuple[int, ...]
    dim: int = 32
    heads: int = 1
    groups: int = 2
    batch: int = 1
    dtype: torch.dtype = torch.float32
    page: int = 0
    padding: tuple[int, ...] = ()
    window: int = 0

    def __str__(self) -> str:
        """Return what is not as ever."""
        some = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name}={getattr(self, f.name)}".replace("torch.", "") for f in some)

    def tokens(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return K, V and queries of a piece."""
        draw = torch.Generator().manual_seed(index)
        heads = self.heads, self.heads, self.heads * self.groups
        k, v, q = (
            torch.randn(self.batch, count, self.pieces[index], self.dim, generator=draw)
            for count in heads
        )
        return tuple(x.to(DEVICE, self.dtype) for x in (k, v, q))  # type: ignore[return-value]

    def cache(self, backend: str) -> Any:
        """Return an empty cache."""
        geometry = CacheGeometry(1, self.heads, self.dim, dtype=self.dtype)
        if backend == "triton" and "kvarn" in self.spec:
            backend = "auto"  # what the kernels do not encode: torch does
        given: dict[str, Any] = {"backend": backend, "check": "deferred"}
        if not self.page:
            return create_cache(self.spec, geometry, **given)
        pages = self.batch * (sum(self.pieces) // self.page + 2)
        given |= {"num_pages": pages, "page_size": self.page}
        pool = create_cache(self.spec, geometry, "paged", **given).cache
        return PagedView(pool, [pool.allocate() for _ in range(self.batch)])

    def config(self, index: int) -> AttendConfig:
        """Return the rules of a call."""
        padding = torch.tensor(self.padding, device=DEVICE) if self.padding and not index else None
        return AttendConfig(padding=padding, sliding_window=self.window or None)


def packed(spec: str) -> str:
    """Return the spec without sinks and window, so that tokens are packed at once."""
    return spec if spec == "none" else spec + (",", ":")[":" not in spec] + "sinks=0,window=0"


def smoke() -> list[Case]:
    """Return cases that launch every kernel."""
    return [
        Case(packed("int:bits=8"), (33, 1, 1)),
        Case(packed("turboquant:bits=4"), (40, 1, 1, 1), dim=64, groups=4),
        Case(packed("turboquant:bits=3"), (130, 1), dim=128, groups=4, dtype=torch.bfloat16),
        Case(f"{packed('turboquant:bits=2')}/{packed('int:bits=4')}", (65, 1), dim=64, groups=4),
        Case(packed("turboquant:bits=3,center=64"), (70, 1)),
        Case(packed("kivi:bits=2"), (40, 1)),
        Case(packed(TRELLIS), (70, 1, 1)),
        Case("none", (20, 1), dtype=torch.float16),
    ]


def formats() -> list[Case]:
    """Return cases over all kinds of slots, and over what calls may be."""
    wide = {"dim": 128, "heads": 2, "groups": 4} if CUDA else {"dim": 32}
    long, dtypes = (700 if CUDA else 70), list(BOUNDS)
    found = []
    for index, spec in enumerate(FORMATS):
        # The keys of tq3 are torch's alone; the others' search takes too long to interpret, and
        # smoke() has a shorter one.
        if spec == "tq3" or ("trellis" in spec and not CUDA):
            continue
        group = parse_spec(spec).key.key_codec(128, torch.float32).group
        pieces = (long if CUDA else max(33, group + 1), 1, 3)
        found.append(Case(packed(spec), pieces, **wide, dtype=dtypes[index % 3]))
    spec = "turboquant:bits=4,sinks=3,window=9/int:bits=8,window=5"
    found += [
        Case(spec, (long, 33, 1, 1), **wide, dtype=torch.bfloat16),
        Case(spec, (long, 1, 1), batch=3, padding=(0, 37, 5), **wide),
        Case(spec, (long, 1, 1), batch=2, page=64, **wide),
        Case(spec, (long, 1, 1), window=50, **wide),
        Case(packed("turboquant:bits=4"), (long, 1), dim=96 if CUDA else 40, groups=3),
        Case(packed("int:bits=4"), (long, 1), dim=64, groups=8),
    ]
    if CUDA:
        for spec in ("turboquant:bits=4", "int:bits=8", "kivi:bits=4", "trellis:bits=4"):
            for dim in (64, 128, 256):
                found.append(Case(spec, (5000, 1, 1, 4), dim, 4, 4, 2, torch.bfloat16))
    return found


def streams(cache: Any) -> list[Any]:
    """Return the streams of a cache or of a view of pages."""
    if isinstance(cache, PagedView):
        return [s for seq in cache.seqs for s in cache.cache.layer_of(seq, 0).streams()]
    return list(cache._layers[0].streams())


def arrays(cache: Any) -> dict[str, Tensor]:
    """Return what is packed, and what it decodes to."""
    found = {}
    for index, stream in enumerate(streams(cache)):
        for field in stream.codec.fields:
            parts = stream.store.tensors(field.name)
            found |= {f"{field.name} {index}, {i}": x for i, x in enumerate(parts)}
    if not isinstance(cache, PagedView):
        found |= {f"decoded {side}": cache.dequantize(0, side) for side in "kv"}
    return found


def differences(case: Case, kept: dict[str, Tensor]) -> tuple[list[str], float]:
    """Return what differs, and the largest error of attention; `kept` takes what was compared."""
    expected, found = case.cache("torch"), case.cache("triton")
    wrong, worst = [], 0.0
    for index in range(len(case.pieces)):
        given = dict(zip("kvq", case.tokens(index), strict=True))
        wanted, got = (
            torch.stack(list(c.attend(0, **given, config=case.config(index)))).float()
            for c in (expected, found)
        )
        error = float((got - wanted).norm() / wanted.norm())
        worst = max(worst, error)
        if not error <= BOUNDS[case.dtype]:  # NaN is wrong, too
            wrong.append(f"attention of call {index}: error {error:.1e}")
            kept |= {f"wanted {index}": wanted, f"got {index}": got}
            kept |= {f"{name} {index}": x for name, x in given.items()}
    theirs, ours = arrays(expected), arrays(found)
    for name in theirs:
        a, b = (x[name].contiguous().view(torch.uint8) for x in (theirs, ours))
        if not torch.equal(a, b):
            wrong.append(f"{name}: {int((a != b).sum())} of {a.numel()} bytes differ")
            kept |= {f"wanted {name}": theirs[name], f"got {name}": ours[name]}
    if not isinstance(found, PagedView):
        other = {name for name in found.stats()["compute"]["attend"] if name != "triton"}
        wrong += [f"{name} attended" for name in other]
    return wrong, worst


def prepare() -> None:
    """Interpret where there is no device; let fast kernels attend the shortest pasts."""
    fast.LEAST_TOKENS = 1
    if not CUDA:
        units.FEW = -1  # segments as on a device
        # A native library, where there is one, would attend in place of what is interpreted.
        backends = [b for b in BACKENDS if b.name not in ("cpu", "triton")]
        backends.insert(0, TritonBackend(on_cpu=True))
        for name in ("choose", "plan"):
            sys.modules[f"kvpact.kernels.{name}"].__dict__["BACKENDS"] = tuple(backends)


def main() -> None:
    """Compare, print a line for each case, and tell what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("smoke", "formats"))
    parser.add_argument("--only", default="", help="a part of a case's text")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-day"))
    options = parser.parse_args()
    prepare()
    place = torch.cuda.get_device_name() if CUDA else "interpreted"
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"Python {python}, torch {torch.__version__}, Triton {installed()}"
    print(f"{place}; {versions}, CUDA {torch.version.cuda}", flush=True)
    launched, bad = set[str](), 0
    for case in globals()[options.which]():
        if options.only not in str(case):
            continue
        kept: dict[str, Tensor] = {}
        begun = time.perf_counter()
        try:
            with Launches() as launches:
                wrong, worst = differences(case, kept)
        except Exception:
            wrong, worst = [traceback.format_exc()], float("nan")
        new = sorted((KERNELS & set(launches.names)) - launched)
        launched |= set(new)
        told = f"error {worst:.1e}, {time.perf_counter() - begun:.1f} s {' '.join(new)}"
        print(f"{'wrong' if wrong else 'right'}: {case}: {told}", flush=True)
        if wrong:
            bad += 1
            name = options.out / f"wrong-{options.which}-{bad}.npz"
            np.savez(name, **{k: x.float().cpu().numpy() for k, x in kept.items()})
            again = f"python tools/gpu_day/gpu_compare.py {options.which} --only '{case}'"
            known = [f"{n}={os.environ[n]}" for n in SETTINGS if n in os.environ]
            print("\n".join((*wrong, f"tensors: {name}", "again: " + " ".join((*known, again)))))
            if options.which == "smoke":
                sys.exit(1)
    missing = KERNELS - launched if options.which == "smoke" and not options.only else set()
    sys.exit(f"{bad} wrong; not launched: {sorted(missing)}" if bad or missing else 0)


if __name__ == "__main__":
    main()
