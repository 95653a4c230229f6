"""What vLLM's own code for CUDA devices chooses; only the device itself is made up."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from kvpact.errors import BackendUnavailable
from kvpact.integrations.vllm import register

SPEC = "turboquant:bits=4,sinks=0"


@pytest.fixture
def on_cuda(monkeypatch):
    """Let vLLM think that it runs on a CUDA device; return a function that sets its capability."""
    # Compiled code, which a build for CPUs lacks.
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("_C_stable_libtorch"))
    import vllm.platforms
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    cuda = importlib.import_module("vllm.platforms.cuda")
    capability = [9, 0]

    class Device(cuda.CudaPlatformBase):
        device_name = "a device made up"

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*capability)

    config = VllmConfig()
    monkeypatch.setenv("KVPACT_VLLM_SPEC", SPEC)
    monkeypatch.setattr(vllm.platforms, "_current_platform", Device())
    selector._cached_get_attn_backend.cache_clear()
    with set_current_vllm_config(config):
        yield lambda *now: capability.__setitem__(slice(None), now)
    selector._cached_get_attn_backend.cache_clear()
    for member in AttentionBackendEnum.__members__.values():
        member.clear_override()


def choose(**asked):
    from vllm.v1.attention.selector import get_attn_backend

    return get_attn_backend(**{"head_size": 128, "dtype": torch.bfloat16, **asked})


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_decoder_gets_kvpact_and_nothing_else_is_left_to_choose(on_cuda, capability):
    from vllm.platforms.cuda import _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability

    on_cuda(*capability)
    register()
    assert choose(kv_cache_dtype="auto").__name__ == "CudaBackend"
    for latent, refused in ((False, "CudaBackend"), (True, "OtherLatentBackend")):
        known = _get_backend_priorities(latent, DeviceCapability(*capability), use_mm_prefix=True)
        assert {backend.get_class().__name__ for backend in known} == {refused}


def test_a_backend_named_by_the_user_is_kvpact_too(on_cuda):
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    get_current_vllm_config().attention_config.backend = AttentionBackendEnum.FLASHINFER
    assert choose(kv_cache_dtype="auto").__name__ == "CudaBackend"


@pytest.mark.parametrize("name", ["FLASH_ATTN_DIFFKV", "B12X", "MINIMAX_M3_SPARSE"])
def test_a_backend_that_is_no_plain_decoders_is_refused(on_cuda, name):
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    get_current_vllm_config().attention_config.backend = AttentionBackendEnum[name]
    with pytest.raises(BackendUnavailable, match="does not cover this --attention-backend"):
        choose(kv_cache_dtype="auto")


@pytest.mark.parametrize(("asked", "reason"), [
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
    ({"has_sliding_window": True}, "sliding window not supported"),
    ({"has_sink": True}, "attention sinks not supported"),
    ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
    ({"use_mla": True}, "latent attention"),
])  # fmt: skip
def test_what_is_not_covered_is_refused_and_not_given_to_others(on_cuda, asked, reason):
    register()
    with pytest.raises(BackendUnavailable, match=reason):
        choose(**{"kv_cache_dtype": "auto", **asked})


def test_connectors_are_refused(on_cuda):
    from vllm.config import KVTransferConfig, get_current_vllm_config

    register()
    config = get_current_vllm_config()
    config.kv_transfer_config = KVTransferConfig(kv_connector="KVPactConnector", kv_role="kv_both")
    with pytest.raises(BackendUnavailable, match="KV connector not supported"):
        choose(kv_cache_dtype="auto")


def test_layers_that_store_by_a_spec_are_still_those_of_a_device(on_cuda):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvpact.integrations.vllm.backend import stored_backend
    from kvpact.spec import parse_spec

    register()
    plain = choose(kv_cache_dtype="auto")
    stored = stored_backend(plain, parse_spec(SPEC))
    assert stored.get_builder_cls() is plain.get_builder_cls()
    assert stored.get_impl_cls() is plain.get_impl_cls()
    pages = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert stored.customize_spec(pages).state_content_bytes == 68


def test_without_a_spec_vllm_chooses_its_own(on_cuda, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.delenv("KVPACT_VLLM_SPEC")
    register()
    assert not any(one.is_overridden() for one in AttentionBackendEnum.__members__.values())


def test_pages_have_whole_tiles_and_the_layout_that_is_asserted(on_cuda):
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    register()
    backend = choose(kv_cache_dtype="auto")
    assert backend.get_preferred_block_size(16) == 32
    assert [one.name for one in get_supported_kv_cache_layouts([backend])] == ["LBHNC"]


def test_no_graph_holds_attention(on_cuda):
    from vllm.config import get_current_vllm_config
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    register()
    backend = choose(kv_cache_dtype="auto")
    config = get_current_vllm_config()
    support = backend.get_builder_cls().get_cudagraph_support(config, None)
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = None  # a start on a CPU has set them already
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    resolved = compilation.resolve_cudagraph_mode_and_sizes(support, backend.get_name())
    assert resolved is CUDAGraphMode.PIECEWISE


class Batch:
    """Makes vLLM's metadata of a batch on a device: what would wait for it can't be read."""

    def __new__(cls, lengths, new, pages):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to("meta"), query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device="meta"),
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(lengths), num_actual_tokens=sum(new), max_query_len=max(new),
            max_seq_len=max(lengths), block_table_tensor=torch.tensor(pages, dtype=torch.int32),
            slot_mapping=torch.zeros(sum(new), device="meta"),
        )  # fmt: skip


@pytest.fixture
def builder(on_cuda, monkeypatch):
    """A builder without the start's checks and log, for which a model is needed."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvpact.integrations.vllm import builder as module
    from kvpact.integrations.vllm.cuda import CudaBuilder

    for name in ("_check", "_scratch", "_log_start"):
        monkeypatch.setattr(module, name, lambda *_: None)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return CudaBuilder(spec, [], get_current_vllm_config(), torch.device("cpu"))


def test_a_batch_is_read_from_what_vllm_keeps_on_the_host(builder):
    batch = Batch([40, 33, 7], [1, 1, 7], [[3, 5, 9], [4, 6, 9], [8, 9, 9]])
    ((rows, prompts),) = builder.build(0, batch).parts
    assert not prompts
    assert [tuple(row) for row in rows] == [(0, 1, 39, (3, 5)), (1, 2, 32, (4, 6)), (2, 9, 0, (8,))]


def test_tokens_that_could_not_be_held_are_told_at_the_next_batch(builder, monkeypatch):
    from kvpact.integrations.pages.damage import Watch
    from kvpact.integrations.vllm import cuda

    watch = Watch("cpu")
    good = watch.flags(8)
    monkeypatch.setattr(cuda, "watch_of", lambda kind: watch)
    errors = []
    monkeypatch.setattr(cuda.logger, "error", lambda *told: errors.append(told))
    batch = Batch([40, 3], [1, 3], [[3, 5], [2, 0]])
    builder.build(0, batch)
    good[2] = False
    builder.build(0, batch)
    builder.build(0, batch)
    assert [count for _, count in errors] == [1]
    assert bool(good.all())
