"""The vLLM that is installed has what the plug-in uses; without one name of it, all is refused."""

import ast
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpact.errors import BackendUnavailable
from kvpact.integrations.vllm import register
from kvpact.integrations.vllm.needs import NEEDS, ON_CPU, check_needs

ALL = [(module, name) for module, names in {**NEEDS, **ON_CPU}.items() for name in names.split()]


@pytest.fixture
def started(monkeypatch):
    import vllm.config.cache as caches
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setenv("KVPACT_VLLM_SPEC", "turboquant:bits=4,sinks=0")
    yield
    for member in AttentionBackendEnum.__members__.values():
        member.clear_override()
    if "kvpact" in getattr(caches, "KV_CACHE_DTYPES", ()):  # vLLM has no way to take it back
        caches.KV_CACHE_DTYPES.remove("kvpact")
        del caches.STR_DTYPE_TO_TORCH_DTYPE["kvpact"], caches._KV_CACHE_DTYPE_HANDLERS["kvpact"]


def test_nothing_is_missing():
    check_needs({**NEEDS, **ON_CPU})


def test_a_private_name_that_went_is_named_at_the_start(started, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for module, name in ALL:
        found = importlib.import_module(module)
        if name == "current_platform":  # made when it is asked for
            continue
        with monkeypatch.context() as gone:
            gone.delattr(found, name)
            with pytest.raises(BackendUnavailable, match=rf"lacks .*: {module}\.{name}\. "):
                register()
    assert not any(one.is_overridden() for one in AttentionBackendEnum.__members__.values())
    register()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden()


def test_a_place_that_went_is_named_and_nothing_is_registered(started, monkeypatch):
    import vllm.v1.attention.backends.registry as registry

    one = registry.AttentionBackendEnum.FLASH_ATTN
    fewer = SimpleNamespace(__members__={"FLASH_ATTN": one})
    monkeypatch.setattr(registry, "AttentionBackendEnum", fewer)
    with pytest.raises(BackendUnavailable, match=r"AttentionBackendEnum\.CPU_ATTN"):
        register()
    assert not one.is_overridden()


def test_its_dtype_is_known_once_the_plug_in_is(started):
    import vllm.config.cache as caches
    from vllm.config import CacheConfig

    with pytest.raises(ValueError, match="dtype"):
        CacheConfig(cache_dtype="kvpact")
    register()
    if hasattr(caches, "register_kv_cache_dtype"):
        assert CacheConfig(cache_dtype="kvpact").cache_dtype == "kvpact"
        assert not caches.is_quantized_kv_cache("kvpact")
        assert caches.STR_DTYPE_TO_TORCH_DTYPE["kvpact"].itemsize == 1
    else:
        with pytest.raises(ValueError, match="dtype"):
            CacheConfig(cache_dtype="kvpact")


def test_operations_take_the_arguments_that_are_given():
    from vllm import _custom_ops

    import kvpact.integrations.vllm.cpu_attention as module

    calls = {
        node.func.attr: {word.arg for word in node.keywords}
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("cpu_att")
    }
    assert len(calls) == 3
    for name, words in calls.items():
        assert words <= set(inspect.signature(getattr(_custom_ops, name)).parameters), name


def test_the_second_model_runner_and_sleep_mode_are_refused_by_name(monkeypatch):
    from vllm.config import VllmConfig

    from kvpact.integrations.vllm.builder import _check

    config = VllmConfig()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(BackendUnavailable, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        _check(config, False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not config.use_v2_model_runner
    covered = SimpleNamespace(is_hybrid=False, enable_sleep_mode=False)
    given = SimpleNamespace(
        parallel_config=config.parallel_config, speculative_config=None, kv_transfer_config=None,
        cache_config=config.cache_config, model_config=covered,
        use_v2_model_runner=config.use_v2_model_runner,
    )  # fmt: skip
    _check(given, False)
    covered.enable_sleep_mode = True
    with pytest.raises(BackendUnavailable, match="does not cover sleep mode"):
        _check(given, False)
    covered.enable_sleep_mode = False
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    with pytest.raises(BackendUnavailable, match="recipe with 'none'"):
        _check(given, False)
