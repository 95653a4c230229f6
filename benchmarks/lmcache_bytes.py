"""Bytes of a chunk of LMCache's in kvpact's serde, beside bf16.

    python benchmarks/lmcache_bytes.py [--layers 30 --heads 3 --head-dim 64 --tokens 256]
        [--calibration FILE] [SPEC …]

LMCache need not be installed: a chunk is packed, and its bytes counted. The calibration is used for
specs that learn; it has to be of a model of these sizes.
"""

import argparse

import torch

from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout
from kvpact.spec import parse_spec

SPECS = [
    "none",
    "int:bits=8",
    "fp8",
    "turboquant:bits=4",
    "int:bits=4,group=128,rotate=true",
    "trellis:bits=4,center=0,first=false,weights=false,blocks=false",
    "kvarn",
    "turboquant:bits=3",
    "kivi",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--calibration", help="file that `kvpact calibrate` wrote")
    parser.add_argument("spec", nargs="*", default=SPECS)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (given.layers, given.tokens, given.heads * 2 * given.head_dim)
    x = torch.randn(shape, generator=generator).bfloat16()
    print("| spec | bytes of a chunk | of bf16 |\n|---|---:|---:|")
    for spec in given.spec:
        layout = ChunkLayout(given.head_dim, given.head_dim)
        learns = parse_spec(spec).key.key_codec(given.head_dim, x.dtype).learns_from
        known = given.calibration if learns else None
        size = len(ChunkFormat(spec, layout, known).pack([x], "0" * 64))
        print(f"| `{spec}` | {size:,} | {size / x.nbytes:.3f} |")


if __name__ == "__main__":
    main()
