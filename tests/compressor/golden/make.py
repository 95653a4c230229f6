"""Write the golden files of fitted methods: `python tests/compressor/golden/make.py`.

Never run by the tests. Later versions have to read a file, and to encode its tokens to its bytes.
"""

from pathlib import Path

import numpy as np
import torch

from kvpact import KVCacheCompressor, parse_spec

FOLDER = Path(__file__).parent
CASES = {
    "lowrank": "lowrank:rank=12/lowrank:rank=9,per_head=false",
    "trellis": "trellis:bits=3/trellis:bits=2",
    "trellis-weights": "trellis:bits=4,center=0,blocks=false/trellis:bits=1",
    "turboquant": "turboquant:bits=3,center=64,first=true/turboquant:bits=2",
    "pca": "pca:bits=2/pca:bits=1.5,states=8",
    "vq": "vq:codebook_size=16/vq:codebook_size=300,dims=5,stages=2",
    "hybrid": "hybrid:rank=24/hybrid:rank=64,quant_bits=8",
    "hybrid-exact": "hybrid:rank=80/hybrid:rank=60,group=20,per_head=false",
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return K with offsets and an outlier channel, V with tokens of unlike size."""
    rng = np.random.default_rng(20)
    k = rng.standard_normal((1, 2, 66, 80)) + 2 * rng.standard_normal(80)
    k[..., 11] *= 12
    v = rng.standard_normal((1, 2, 66, 64)) * np.exp(rng.standard_normal((1, 1, 66, 1)))
    return torch.from_numpy(k).half(), torch.from_numpy(v).half()


def main() -> None:
    """Write the files that are not there."""
    for name, spec in CASES.items():
        path = FOLDER / f"{name}-v{parse_spec(spec).key.version}.safetensors"
        if not path.exists():
            KVCacheCompressor(spec).compress_kv(*inputs()).save(path)
            print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
