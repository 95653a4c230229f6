"""Bytes of a chunk of LMCache's in kvpact's serde, beside bf16.

    python benchmarks/lmcache_bytes.py [--layers 30 --heads 3 --head-dim 64 --tokens 256] …

LMCache need not be installed: a chunk is packed, and its bytes counted. The calibration, a file
that `kvpact calibrate` wrote, is used for specs that learn; it has to be of a model of these sizes.
"""

import runner
import torch

from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout
from kvpact.spec import parse_spec

SPECS = [
    "none", "int:bits=8", "fp8", "turboquant:bits=4", "int:bits=4,group=128,rotate=true",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false", "kvarn", "turboquant:bits=3",
    "kivi",
]  # fmt: skip


def main():
    sizes = {"layers": 30, "heads": 3, "head_dim": 64, "tokens": 256}
    options = runner.arguments(__doc__, "specs", specs=SPECS, calibration=str, **sizes)
    shape = (options.layers, options.tokens, options.heads * 2 * options.head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = []
    for spec in options.specs:
        layout = ChunkLayout(options.head_dim, options.head_dim)
        learns = parse_spec(spec).key.key_codec(options.head_dim, x.dtype).learns_from
        known = options.calibration if learns else None
        size = len(ChunkFormat(spec, layout, known).pack([x], "0" * 64))
        rows.append({"spec": spec, "bytes": size, "of bf16": size / x.nbytes})
    cells = [[f"`{r['spec']}`", f"{r['bytes']:,}", f"{r['of bf16']:.3f}"] for r in rows]
    body = runner.table("spec | bytes of a chunk | of bf16", cells)
    runner.report(options, "lmcache_bytes", rows, body, [*sizes])


if __name__ == "__main__":
    main()
