"""What the process holds for a cache, by the kernel's count and by malloc's, in fresh processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpact.kernels import malloc_here

MIB = 1 << 20
HELPERS = Path(__file__).parents[1] / "helpers"
PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from kvpact import CompressedCache
from kvpact.kernels.cpu.heap import _native

spec, layers, heads, width, tokens, chunk, keep, counted = json.loads(sys.argv[1])
from kvpact.integrations.transformers.versions import named

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=heads * 64, intermediate_size=width, num_hidden_layers=layers,
    num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=8192,
)).eval()
ids = torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(1))

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(key)).split()[1]) * 1024

def run(cache, ids):
    given = {"prefill_chunk_size": chunk} if chunk else {}
    fixed = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 4, "max_new_tokens": 4}
    model.generate(ids, **named(cache), **fixed, **given)
    gc.collect()

def made():
    return DynamicCache(config=model.config) if spec == "exact" else CompressedCache(model, spec)

run(made(), ids[:, :64])
if counted:
    run(made(), ids[:, :600])
    live = ctypes.CDLL(None).live_allocations
cache = made()
before, blocks = status("VmRSS"), live() if counted else 0
Path("/proc/self/clear_refs").write_text("5")
if keep:
    with torch.no_grad():
        model(ids, **named(cache), logits_to_keep=1)
    gc.collect()
else:
    run(cache, ids)
found = {"peak": status("VmHWM") - before, "after": status("VmRSS") - before}
found["blocks"] = live() - blocks if counted else 0
found["cache"] = 0 if spec == "exact" else cache.nbytes
found["holders"] = 0 if _native() is None else _native().heap_hold(1) - 1
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(malloc_here().reason),
    reason=f"malloc is not told of prompts: {malloc_here()}",
)


def measured(spec, layers=10, heads=8, width=2048, tokens=2000, chunk=0, keep=False, **environment):
    counted = "LD_PRELOAD" in environment
    order = json.dumps([spec, layers, heads, width, tokens, chunk, keep, counted])
    command = [sys.executable, "-c", PROGRAM, order]
    given = os.environ | environment
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("spec", "chunk", "keep"),
    [("trellis:bits=4", 0, False), ("trellis:bits=4", 0, True), ("trellis:bits=4", 256, False)],
)
def test_a_prompt_leaves_what_its_cache_holds(spec, chunk, keep):
    found = measured(spec, chunk=chunk, keep=keep)
    assert found["cache"] > 8 * MIB and found["after"] <= 1.25 * found["cache"] + 8 * MIB
    assert found["holders"] == 0


@pytest.mark.slow
def test_a_prompt_that_stays_exact_takes_no_more_than_dynamic_cache():
    exact, found = measured("exact"), measured("none")
    assert found["peak"] <= exact["peak"] + 2 * MIB
    assert found["after"] <= 1.25 * found["cache"] + 8 * MIB


def test_few_blocks_live_on_for_a_layer(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path / "live_allocations.so"
    source = HELPERS / "live_allocations.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    small = {"layers": 30, "heads": 3, "width": 64, "tokens": 4000, "keep": True}
    found = measured("trellis:bits=4", **small, LD_PRELOAD=str(library))
    assert 300 < found["blocks"] <= 1500
