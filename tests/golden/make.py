"""Write the golden slots of the current code: `python tests/golden/make.py [METHOD …]`.

Never run by the tests: later versions have to read a file. --force is for those of no release.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from kvpact.formats import FORMAT_VERSION, TILE
from kvpact.methods import Codec
from kvpact.registry import find_method
from kvpact.spec import parse_spec

FOLDER = Path(__file__).parent
TOKENS, KEY_DIM, VALUE_DIM = 66, 80, 64
SHOWN = [0, 1, 32, 63]  # tokens whose decoded values are stored

UNLEARNT = "first=false,weights=false,blocks=false"
PLAIN = f"center=0,{UNLEARNT}"

# K and V differ, so that a few cases cover many widths in both orders.
CASES = {
    "none": ["none:dtype=bf16/none:dtype=fp16"],
    "fp8": ["fp8:format=e4m3/fp8:format=e5m2,scale=none"],
    "int": [
        "int:bits=8/int:bits=4", "int:bits=3,zero=true/int:bits=5,zero=true",
        "int:bits=6,group=64/int:bits=8",
        "int:bits=4,group=80,rotate=true/int:bits=2,zero=true,rotate=true,seed=5",
    ],
    "turboquant": [
        "turboquant:bits=4/turboquant:bits=3", "turboquant:bits=3/turboquant:bits=4",
        "turboquant:bits=3,mode=prod/turboquant:bits=2,scale=l2",
        "turboquant:bits=2,scale=unbiased,center=64/turboquant:bits=1",
        "turboquant:bits=5,seed=7/turboquant:bits=8,seed=-1",
    ],
    "trellis": [
        f"trellis:bits=4,{PLAIN}/trellis:bits=3",
        f"trellis:bits=1,states=8,{PLAIN}/trellis:bits=6",
        f"trellis:bits=2,center=64,{UNLEARNT}/trellis:bits=5,states=8,seed=3",
    ],
    "kivi": ["kivi:bits=2/kivi:bits=2", "kivi:bits=4,group=64/kivi:bits=3"],
    "kvarn": ["kvarn:bits=4/kvarn:bits=2", "kvarn:bits=3,group=32/kvarn:bits=3,group=32"],
    "polarquant": [
        "polarquant/polarquant",
        "polarquant:levels=6,first=3,seed=3/polarquant:levels=2,first=7",
    ],
    "qjl": ["qjl", "qjl:sketch=1,seed=9/qjl:value_bits=3,value_group=64"],
}  # fmt: skip


def inputs() -> dict[str, torch.Tensor]:
    """Return K with offsets and an outlier channel, V with tokens of unlike size; one is zero."""
    rng = np.random.default_rng(20)
    k = rng.standard_normal((1, 1, TOKENS, KEY_DIM)) + 2 * rng.standard_normal(KEY_DIM)
    k[..., 11] *= 12
    v = rng.standard_normal((1, 1, TOKENS, VALUE_DIM))
    v *= np.exp(rng.standard_normal((1, 1, TOKENS, 1)))
    k[:, :, 1], v[:, :, 1] = 0, 0
    return {"k": torch.from_numpy(k).half(), "v": torch.from_numpy(v).half()}


def encode(codec: Codec, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the slots of all complete groups, by field, in as many units as they need."""
    tokens = x.shape[2] // codec.group * codec.group
    arrays = codec.encode(x[:, :, :tokens].float())
    slots = {}
    for field in codec.fields:
        units = -(-tokens // max(field.tokens, TILE))
        slots[field.name] = field.allocate(1, 1, units * field.tokens, x.device)
        field.write(slots[field.name], 0, arrays[field.name])
    return slots


def make(method: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a method's file."""
    given = inputs()
    tensors = {f"input|{side}": x for side, x in given.items()}
    for text in CASES[method]:
        spec = parse_spec(text)
        codecs = {
            "k": spec.key.key_codec(KEY_DIM, torch.float16),
            "v": spec.value.value_codec(VALUE_DIM, torch.float16),
        }
        for side, codec in codecs.items():
            slots = encode(codec, given[side])
            fields = {field.name: field.read(slots[field.name]) for field in codec.fields}
            decoded = codec.transform.inverse(codec.decode(fields))[:, :, SHOWN]
            tensors |= {f"{text}|{side}|{name}": tensor for name, tensor in slots.items()}
            tensors[f"{text}|{side}|expected"] = decoded.contiguous()
    metadata = {
        "method": method, "method_version": str(find_method(method).version),
        "format_version": str(FORMAT_VERSION), "shown": json.dumps(SHOWN),
        "cases": json.dumps([[text, parse_spec(text).to_json()] for text in CASES[method]]),
    }  # fmt: skip
    return tensors, metadata


def main() -> int:
    """Write the files asked for; 1 if one was there already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="all if omitted")
    parser.add_argument("--force", action="store_true", help="overwrite files of no release")
    options = parser.parse_args()
    unknown = set(options.methods) - set(CASES)
    if unknown:
        parser.error(f"no cases for {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    kept = False
    for method in options.methods or CASES:
        version = find_method(method).version
        path = FOLDER / f"{method}-v{version}-format{FORMAT_VERSION}.safetensors"
        if path.exists() and not options.force:
            print(f"{path.name} is there already and stays as it is", file=sys.stderr)
            kept = True
            continue
        tensors, metadata = make(method)
        save_file(tensors, path, metadata)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return int(kept)


if __name__ == "__main__":
    sys.exit(main())
