"""Models in folders, and engines that are started over them; all of it needs vLLM."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PROCESS = Path(__file__).parent / "vllm_process.py"


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="vLLM is not installed here; `make test-engines` installs it")
    for item in items:
        if item.path.parent == PROCESS.parent:
            item.add_marker(pytest.mark.engine)
            if find_spec("vllm") is None:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def make_toy(tmp_path_factory):
    """Return a function that saves a random model of two layers and returns its folder."""

    def make(dim=64, kind="Llama", **options):
        import transformers

        torch.manual_seed(0)
        sizes = {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": dim,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
        folder = tmp_path_factory.mktemp("toy")
        getattr(transformers, f"{kind}ForCausalLM")(config).eval().save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def toy(make_toy):
    return make_toy()


@pytest.fixture(scope="session")
def run_vllm(tmp_path_factory):
    """Return a function that runs one engine and returns its answer, or what it died of."""

    def run(spec=None, *, processes=False, fails=False, greedy=(), forced=(), **llm):
        folder = tmp_path_factory.mktemp("engine")
        ask, answer = folder / "ask.json", folder / "answer.json"
        llm = {"block_size": 32, "kv_cache_memory_bytes": 1 << 28, **llm}
        ask.write_text(json.dumps({"llm": llm, "greedy": greedy, "forced": forced}))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVPACT_VLLM"))}
        env |= {
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            # One process instead of three: a start takes a third of the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if spec is not None:
            env["KVPACT_VLLM_SPEC"] = spec
        done = subprocess.run(
            [sys.executable, str(PROCESS), str(ask), str(answer)],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=500,
        )
        log = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, log[-6000:]
        return {"log": log, **(json.loads(answer.read_text()) if not fails else {})}

    return run
