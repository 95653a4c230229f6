"""Two engines, each a process of its own, over one store: a folder, redis and Mooncake."""

from urllib.parse import quote

import pytest
from tcp_proxy import Proxy
from vllm_engine import sharing
from vllm_prompts import ids

SPEC = "turboquant:bits=4,sinks=0"
TOKENS, WHOLE = 2000, 31 * 64
LAYERS, HEADS, DIM = 4, 4, 64
FP16 = WHOLE * LAYERS * HEADS * 2 * DIM * 2
"""Bytes of K and V of the prompt's whole chunks."""


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "store"), None


@pytest.fixture
def redis(start_server, tmp_path):
    server = start_server(tmp_path)
    with Proxy(server.port) as line:
        yield f"redis://:{quote(server.password)}@127.0.0.1:{line.port}", line
    server.kill()


@pytest.fixture
def mooncake(start_master):
    master = start_master()
    yield f"{master.url}&segment_size=128MiB", None
    master.kill()


@pytest.mark.parametrize("store", ["folder", "redis", "mooncake"])
def test_the_second_engine_loads_what_the_first_computed(request, start_vllm, make_toy, store):
    url, line = request.getfixturevalue(store)
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS}
    model = make_toy(DIM, max_position_embeddings=4096, **sizes)
    prompt = ids(TOKENS, seed=2)
    options = {"model": model, "dtype": "bfloat16", "max_model_len": 2560, **sharing(url)}
    with start_vllm(SPEC, **options) as first, start_vllm(SPEC, **options) as second:
        first.ask("greedy", prompts=[prompt], tokens=24)
        first.ask("saved")
        # Its prefix comes from the first engine's own pages, as the second's comes from the store.
        right = first.ask("greedy", prompts=[prompt], tokens=24)
        received = line and line.received
        assert second.ask("greedy", prompts=[prompt], tokens=24) == right
        counts = second.ask("counts")
        assert counts["loaded_tokens"] == WHOLE
        assert counts["loaded_bytes"] <= 0.29 * FP16
        if line:
            assert counts["loaded_bytes"] < line.received - received <= 0.29 * FP16
        assert second.ask("forget")
