"""Which kernel attends: what is asked for, what this machine has, and what is refused."""

import sys

import pytest
import torch
from compare import both, latents, random_tokens
from latent_heads import heads_of

from kvpact import AttendConfig, CacheGeometry, MLACache, create_cache
from kvpact.errors import BackendUnavailable, GeometryError, KVPactError
from kvpact.kernels import choose
from kvpact.kernels.cpu import LEVELS, library
from kvpact.kernels.cpu.library import _load
from kvpact.testing.data import by_name

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


def test_the_kernel_is_told_and_chosen():
    geometry = CacheGeometry(1, 2, 64)
    cpu = create_cache("turboquant:bits=4", geometry, backend="cpu").stats()["compute"]
    assert cpu["name"] == "cpu" and cpu["requested"] == "cpu"
    assert create_cache("fp8", geometry, backend="torch").stats()["compute"]["name"] == "torch"
    with pytest.raises(BackendUnavailable, match="auto, cpu, triton, torch"):
        create_cache("fp8", geometry, backend="gpu")
    _, _, calls = both("turboquant:bits=4,mode=prod", backend="auto")
    assert calls == {"torch": 1}
    _, _, calls = both("turboquant:bits=4", new=40)
    assert calls == {"cpu": 1}
    expected, found, calls = both("none", held=0, new=9, dim=1040, backend="auto")
    assert calls == {"torch": 1} and torch.equal(expected, found)  # too wide


def test_without_the_library(monkeypatch):
    """No compiler at installation: auto computes in torch, a name raises with the reason."""
    module = sys.modules["kvpact.kernels.cpu.library"]
    monkeypatch.setattr(module, "_load", lambda: "not built: no compiler")
    cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64))
    cache.store(0, **by_name(*torch.zeros(2, 1, 2, 3, 64)))
    stats = cache.stats()["compute"]
    assert stats["name"] == "torch"
    assert all("no compiler" in stats["reasons"][f"{op}: torch"] for op in ("attend", "encode"))
    with pytest.raises(BackendUnavailable, match="no compiler"):
        choose("cpu")


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
@pytest.mark.parametrize("spec", ("vq:dims=2", "qjl/int:bits=4", "turboquant:bits=4,mode=prod"))
def test_a_backend_asked_for_by_name_runs_or_raises(spec, layout):
    """`kernel="exact"` ran torch silently where it covered nothing."""
    options = {"num_pages": 2} if layout == "paged" else {}
    with pytest.raises(BackendUnavailable, match="'cpu' can't attend: cpu: no native format"):
        create_cache(spec, CacheGeometry(1, 2, 64), layout, backend="cpu", **options)


def test_a_misspelt_simd_level_is_an_error_and_not_a_slow_cache(monkeypatch):
    monkeypatch.setenv("KVPACT_SIMD", "avx3")
    known = "none, neon, avx2, avx512, avx512vbmi"
    with pytest.raises(BackendUnavailable, match=f"KVPACT_SIMD='avx3' is not one of {known}"):
        create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64))


@pytest.mark.parametrize("level", LEVELS)
def test_a_cap_takes_the_best_that_the_processor_has_below_it(monkeypatch, level):
    monkeypatch.setenv("KVPACT_SIMD", level)
    below = [*LEVELS][: [*LEVELS].index(level) + 1]
    assert _load.__wrapped__().level == [x for x in library().levels if x in below][-1]


def test_a_library_of_older_sources_is_told_not_loaded(monkeypatch):
    module = sys.modules["kvpact.kernels.cpu.library"]

    def missing(path, level):
        raise AttributeError("undefined symbol")

    monkeypatch.setattr(module, "NativeLibrary", missing)
    assert "another version" in module._load.__wrapped__()


def test_heads_over_latents_are_counted_as_native():
    cache = MLACache("turboquant:bits=4", 1, 32, 8)
    generator = torch.Generator().manual_seed(0)
    for count in (50, 1, 20):
        made = [random_tokens(generator, 1, 1, count, d) for d in (32, 8)]
        made += [random_tokens(generator, 1, 4, count, d) for d in (16, 8)]
        made += [random_tokens(generator, 4, d, 32) for d in (16, 12)]
        cache.attend_heads(0, **heads_of(*made))
    assert cache.stats()["compute"]["attend"] == {"cpu": 3}
    with pytest.raises(GeometryError, match="mask"):
        q = random_tokens(generator, 1, 4, 1, 40)
        mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
        config = AttendConfig(softmax_scale=1.0, mask=mask)
        cache.attend(0, k=made[0][:, :, :1], v=made[1][:, :, :1], q=q, config=config)


def test_rows_decide_on_the_kernel(monkeypatch):
    """Rows are query heads of a KV head times queries; latents always have many."""
    taken, real = [], library()

    class Library:
        def __getattr__(self, name):
            return getattr(real, name)

        def attend(self, bit, args, count):
            taken.append("few")
            return real.attend(bit, args, count)

        def attend_rows(self, bit, args, latent):
            taken.append("latent" if latent else "many")
            return real.attend_rows(bit, args, latent)

    monkeypatch.setattr("kvpact.kernels.cpu.backend.library", lambda: Library())
    both("turboquant:bits=4", groups=1, new=9, many=12)  # too many for a step
    both("turboquant:bits=4", groups=2, new=9, many=12)
    latents("turboquant:bits=4", groups=1, new=9)
    assert taken == ["few", "many", "latent"]


@pytest.mark.parametrize("status", (2, 3))
def test_a_refusal_of_the_kernel_is_named(monkeypatch, status):
    class Library:
        def __getattr__(self, name):
            return getattr(library(), name)

        def attend_rows(self, bit, args, latent):
            return status

    monkeypatch.setattr("kvpact.kernels.cpu.backend.library", lambda: Library())
    with pytest.raises(MemoryError if status == 3 else KVPactError):
        both("turboquant:bits=4", new=40)
