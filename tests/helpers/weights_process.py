"""One of two processes that share a model's weights: prints what it reads of them, as JSON.

python weights_process.py RANK FOLDER KIND...
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.attention.calibrate import output_energies
from kvpact.integrations.transformers.model.offsets import key_offsets
from kvpact.integrations.transformers.versions import named
from kvpact.stores import open_store

SPEC = "int:bits=8"


def qwen2():
    """Return a model of two KV heads, whose keys have a bias in two channels of each."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = Qwen2Config(hidden_size=64, intermediate_size=96, vocab_size=64, **heads)
    model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.view(2, 16)
        bias[0, [1, 9]], bias[1, [2, 10]] = torch.tensor([40.0, -30.0]), torch.tensor([25.0, 50.0])
    return model


def read(model, store):
    """Return what is read of a model's weights, and with which keys prefixes are stored."""
    offsets, ids = key_offsets(model), torch.arange(70)[None] % 64
    text = []
    for _ in range(2):  # the second cache is served what the first one stored
        cache = CompressedCache(model, SPEC)
        prefixes = prefix_cache(open_store(store), model, cache, fingerprint="mine")
        held = prefixes.load(ids[:, :-1])
        prefixes.prefill(ids)
        with torch.no_grad():
            logits = model(ids[:, 64:], **named(cache)).logits
        text.append([held, logits.argmax(-1).tolist()])
    return {
        "offsets": [[offset.channels, offset.bias] for _, offset in sorted(offsets.items())],
        "energies": [x.tolist() for _, x in sorted(output_energies(model).items())],
        "fingerprint": model_fingerprint(model), "key": prefixes.keys(ids)[0], "text": text,
    }  # fmt: skip


def main(rank, folder, kind):
    """Share the model with the other process."""
    from torch import distributed
    from torch.distributed import fsdp
    from torch.distributed.tensor import parallel

    start = {"init_method": f"file://{folder}/{kind}", "rank": rank, "world_size": 2}
    distributed.init_process_group("gloo", **start)
    model, mesh = qwen2(), distributed.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        if kind == "tensor":
            plan = {f"{x}_proj": parallel.ColwiseParallel() for x in "qkv"}
            plan["o_proj"] = parallel.RowwiseParallel()
            parallel.parallelize_module(layer.self_attn, mesh, plan)
        else:
            fsdp.fully_shard(layer, mesh=mesh)
    if kind == "data":
        fsdp.fully_shard(model, mesh=mesh)
    found = read(model, f"file://{folder}/store" if kind == "tensor" else "memory://")
    distributed.barrier()
    distributed.destroy_process_group()
    Path(folder, f"{kind}{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for each in sys.argv[3:]:
        main(int(sys.argv[1]), sys.argv[2], each)
