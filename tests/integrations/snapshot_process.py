"""Writes snapshots and dies, or goes on from them: `snapshot_process.py save|go FOLDER`."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvpact.integrations.transformers.model.facts import layer_facts

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from tiny_configs import KINDS
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import kvpact
from kvpact import CacheGeometry, PagedKVCache, Snapshot
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CompressedCache, PagedBatch
from kvpact.integrations.transformers.versions import VersionError, named
from kvpact.registry import Alias

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GEOMETRY = CacheGeometry(2, 2, 16, dtype=torch.float32)
PROMPT = torch.arange(2 * 200).view(2, 200) * 7 % 96  # the largest group leaves the window
NEXT = torch.tensor([[5, 6, 7], [8, 9, 10]])


def methods() -> list[str]:
    return [name for name, m in kvpact.list_methods().items() if not isinstance(m, Alias)]


def model(config):
    torch.manual_seed(0)
    attention = "eager" if config.model_type == "deepseek_v4" else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def calibration() -> dict:
    generator = torch.Generator().manual_seed(1)
    return {i: tuple(torch.randn(1, 2, 300, 16, generator=generator) for _ in range(2))
            for i in range(2)}  # fmt: skip


@torch.no_grad()
def contiguous(net, name: str, snapshot: Snapshot | None, folder: Path):
    cache = CompressedCache(net.config, name)
    if snapshot is None:
        net(PROMPT, **named(cache))
        cache.snapshot(token_ids=PROMPT).save(folder / f"{name}.contiguous")
    else:
        cache.restore(snapshot)
    return net(NEXT, **named(cache)).logits


@torch.no_grad()
def paged(net, name: str, snapshot: Snapshot | None, folder: Path):
    held = PagedKVCache(name, GEOMETRY, 24, calibration=snapshot or calibration())
    if snapshot is None:
        seqs = [held.allocate() for _ in range(2)]
        net(PROMPT, **named(PagedBatch(net.config, held, seqs)))
        held.snapshot(seqs, token_ids=PROMPT).save(folder / f"{name}.paged")
    else:
        seqs = [held.restore(snapshot, row=row) for row in range(2)]
    return net(NEXT, **named(PagedBatch(net.config, held, seqs))).logits


@torch.no_grad()
def of_kinds(net, name: str, snapshot: Snapshot | None, folder: Path):
    net = model(KINDS[name]({**SIZES, "vocab_size": 128, "pad_token_id": 0}))
    packed = "trellis:bits=4,window=8" if name == "gemma3" else None
    cache = CompressedCache(net.config, "trellis:bits=4", sliding=packed)
    if snapshot is None:
        net(PROMPT, **named(cache))
        cache.snapshot().save(folder / f"{name}.of_kinds")
    else:
        cache.restore(snapshot)
    return net(NEXT, **named(cache)).logits


def kinds() -> list[str]:
    """Return the kinds that this transformers has, and kvpact caches."""
    found = []
    for name, make in KINDS.items():
        with suppress(pytest.skip.Exception, VersionError):
            layer_facts(make(SIZES))
            found.append(name)
    return found


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    net, found = model(LlamaConfig(**SIZES)), {}
    for layout, names in ((contiguous, methods()), (paged, methods()), (of_kinds, kinds())):
        for name in names:
            path = folder / f"{name}.{layout.__name__}"
            snapshot = Snapshot.load(path) if what == "go" else None
            logits = layout(net, name, snapshot, folder)
            found[f"{name} {layout.__name__}"] = logits.numpy().tobytes().hex()
    found["model"] = model_fingerprint(net)
    (folder / f"{what}.json").write_text(json.dumps(found))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
