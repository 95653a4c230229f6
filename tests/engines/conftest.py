"""Models in folders, and engines that are started over them; all of it needs vLLM."""

from importlib.util import find_spec

import pytest
import torch
from vllm_engine import PROCESS, Engine


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
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": dim,
            "max_position_embeddings": 1024, "initializer_range": 0.2, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip
        names = (f"{kind}TextConfig", f"{kind}Config")
        name = next(name for name in names if hasattr(transformers, name))
        config = getattr(transformers, name)(**{**sizes, **options})
        folder = tmp_path_factory.mktemp("toy")
        getattr(transformers, f"{kind}ForCausalLM")(config).eval().save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def toy(make_toy):
    return make_toy()


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory):
    """Return a function that calibrates a toy as `kvpact calibrate` does; the file's path."""

    def run(folder, seed=0, specs=("trellis:bits=4,sinks=0", "trellis:bits=4,center=0,sinks=0")):
        from transformers import AutoModelForCausalLM

        from kvpact.integrations.transformers import calibrate
        from kvpact.spec import parse_spec

        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        generator = torch.Generator().manual_seed(seed)
        texts = [torch.randint(3, 512, (512,), generator=generator) for _ in range(2)]
        path = tmp_path_factory.mktemp("calibration") / "toy.kvcal"
        calibrate(model, texts, list(map(parse_spec, specs))).save(path)
        return path

    return run


@pytest.fixture(scope="session")
def start_vllm(tmp_path_factory):
    """Return a function that starts an engine: `vllm_engine.Engine`."""

    def start(spec=None, **options):
        return Engine(tmp_path_factory.mktemp("engine"), spec, **options)

    return start


@pytest.fixture(scope="session")
def run_vllm(start_vllm):
    """Return a function that runs one engine and returns its answers, or what it died of."""

    def run(spec=None, *, fails=False, greedy=(), forced=(), **options):
        with start_vllm(spec, **options) as engine:
            if fails:
                assert engine.close() != 0
                return {"log": engine.log}
            return {
                "capacity": engine.ask("capacity"),
                "greedy": [engine.ask("greedy", prompts=p, tokens=n) for p, n in greedy],
                "forced": [engine.ask("forced", prompt=prompt) for prompt in forced],
                "metrics": engine.ask("metrics"),
                "scraped": engine.ask("scraped"),
                "all_free": engine.ask("forget"),
                "log": engine.log,
            }

    return run
