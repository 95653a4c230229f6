"""The HiCache storage backend, over a stand-in of SGLang's interface and of its host pools.

With ``-m engine``, where SGLang is installed, over its own interface, made by its own factory.
"""

import importlib
import inspect
import sys
import types
from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest
import torch

from kvpact.calibration import Calibration, LayerTokens, calibrate_layer
from kvpact.errors import DtypeError, GeometryError, KVPactError, SpecError
from kvpact.integrations.sglang.pages import PageLayout
from kvpact.spec import parse_spec
from kvpact.testing.held import same_bytes

LAYERS, HEADS, TOKENS, DIM = 3, 2, 64, 32
SIZES = {"L": LAYERS, "H": HEADS, "T": TOKENS, "D": DIM}
ORDERS = {"layer_first": "LTHD", "page_first": "TLHD", "page_first_direct": "LTHD",
          "page_head": "HTLD"}  # fmt: skip
NAME = "sglang.srt.mem_cache.hicache_storage"


class Interface(ABC):
    """As SGLang's `HiCacheStorage`: what is abstract, and what it does itself."""

    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def batch_exists(self, keys, extra_info=None):
        return next((i for i, key in enumerate(keys) if not self.exists(key)), len(keys))

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...

    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...

    @abstractmethod
    def exists(self, key): ...


@pytest.fixture(
    scope="module", params=["stand-in", pytest.param("sglang", marks=pytest.mark.engine)]
)
def storage(request):
    """The module that SGLang loads, over the stand-in or over SGLang itself."""
    path = "kvpact.integrations.sglang.storage"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sglang":
            pytest.importorskip(NAME)
            patch.delitem(sys.modules, path, raising=False)
            yield importlib.import_module(path)
            sys.modules.pop(path)
            return
        parts = NAME.split(".")
        for i in range(1, len(parts) + 1):
            patch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        sys.modules[NAME].HiCacheStorage = Interface
        patch.delitem(sys.modules, path, raising=False)
        yield importlib.import_module(path)
        sys.modules.pop(path)


def config(model="toy", rank=0, **extra):
    given = {"kvpact": {"spec": "turboquant:bits=4", "store": "memory://"}, **extra}
    return SimpleNamespace(
        tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, model_name=model, extra_config=given,
    )  # fmt: skip


def pool(layout="layer_first", **others):
    given = {"layer_num": LAYERS, "head_num": HEADS, "page_size": TOKENS, "head_dim": DIM}
    return SimpleNamespace(**{"layout": layout, "dtype": torch.float16, **given, **others})


def backend(storage, store=None, own=None, **options):
    found = storage.KVPactStorage(config(**options))
    found.store = found.store if store is None else store
    found.register_mem_pool_host(own or pool())
    return found


@pytest.fixture
def x():
    shape = (2, LAYERS, HEADS, TOKENS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()


def flat(x, layout="layer_first"):
    return x.permute(0, *(1 + "LHTD".index(axis) for axis in ORDERS[layout])).flatten()


@pytest.mark.engine
def test_the_stand_in_has_the_signatures_of_sglang():
    theirs = pytest.importorskip(NAME).HiCacheStorage
    assert theirs.__abstractmethods__ == Interface.__abstractmethods__
    for name in (*theirs.__abstractmethods__, "register_mem_pool_host", "batch_exists"):
        mine, its = (inspect.signature(getattr(x, name)).parameters for x in (Interface, theirs))
        both = [[(p.name, p.default) for p in x.values()] for x in (mine, its)]
        assert both[0] == both[1]


@pytest.mark.engine
def test_sglang_s_factory_makes_the_backend_by_its_path(x):
    module = pytest.importorskip(NAME)
    factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
    path = "kvpact.integrations.sglang.storage"
    given = config(backend_name="kvpact", module_path=path, class_name="KVPactStorage")
    told = {**vars(given), "enable_storage_metrics": False, "is_page_first_layout": False}
    one = factory.create_backend("dynamic", module.HiCacheStorageConfig(**told), pool())
    one.register_mem_pool_host(pool())
    one.on_host_pools_registered()
    assert one.batch_set(["a"], [flat(x)]) and one.batch_exists(["a", "b"]) == 1
    with pytest.raises(SpecError, match="lacks spec or store"):
        told["extra_config"].pop("kvpact")
        factory.create_backend("dynamic", module.HiCacheStorageConfig(**told), pool())


@pytest.mark.parametrize("layout", sorted(ORDERS))
def test_pages_come_back_in_every_layout(storage, x, layout):
    one = backend(storage, own=pool(layout))
    assert one.batch_set(["a", "b"], [flat(x, layout), flat(2 * x, layout)])
    assert one.batch_exists(["a", "b", "c"]) == 2
    places = [torch.full((x.numel(),), torch.nan).half() for _ in range(3)]
    first, second, none = one.batch_get(["a", "b", "c"], places)
    assert first is places[0] and none is None and places[2].isnan().all()
    for page, given in ((first, x), (second, 2 * x)):
        assert 0.05 < (page - flat(given, layout)).float().norm() / given.float().norm() < 0.11
    (held,) = {len(one.store.get(key)) for key in one.store}
    assert held < 0.35 * x.nbytes
    assert one.stats() == {
        "stored": 2, "not_stored": 0, "loaded": 2, "missed": 1, "damaged": 0, "unreadable": 0,
    }  # fmt: skip


def test_pages_of_a_calibrated_trellis_are_those_of_the_same_calibration_alone(
    storage, x, tmp_path
):
    def made(seed, heads=HEADS, **options):
        generator = torch.Generator().manual_seed(seed)
        layers = {}
        for layer in range(LAYERS):
            k = torch.randn(1, heads, 128, DIM, generator=generator) + layer
            layers[layer] = calibrate_layer(LayerTokens(k, k, k.square()), [parse_spec("trellis")])
        path = tmp_path / f"{seed}.kvcal"
        Calibration(layers).save(path)
        given = {"spec": "trellis:bits=4", "store": "memory://", "calibration": str(path)}
        return backend(storage, kvpact=given, **options)

    one = made(0)
    same, other = made(0, store=one.store), made(1, store=one.store)
    assert one.set("a", flat(x)) and same.exists("a") and not other.exists("a")
    assert other.set("a", flat(x)) and len(one.store) == 2
    found, place = (torch.full((x.numel(),), torch.nan).half() for _ in range(2))
    assert same.get("a", found) is found and other.get("a", place) is place
    assert 0.05 < (found - flat(x)).float().norm() / x.float().norm() < 0.11
    assert not torch.equal(found, place)
    with pytest.raises(SpecError, match="a part of its heads or layers"):
        made(2, heads=4)


def test_layouts_share_pages(storage, x):
    one = backend(storage)
    other = backend(storage, store=one.store, own=pool("page_head"))
    assert one.set("a", flat(x))
    mine, its = (torch.empty(x.numel()).half() for _ in range(2))
    one.get("a", mine), other.get("a", its)
    k = mine.view(2, LAYERS, TOKENS, HEADS, DIM).permute(0, 1, 3, 2, 4)
    assert same_bytes(flat(k, "page_head"), its)


@pytest.mark.parametrize(
    "options", [{"model": "other"}, {"rank": 1}, {"kvpact": {"spec": "int:bits=8", "store": "memory://"}},
                {"own": pool(dtype=torch.bfloat16)}, {"own": pool(layer_num=4)}],
)  # fmt: skip
def test_whose_page_it_is_counts(storage, x, options):
    one = backend(storage)
    other = backend(storage, store=one.store, **options)
    assert one.set("a", flat(x)) and not other.exists("a")
    assert other.get("a", torch.empty(10).half()) is None
    other.clear()
    assert one.exists("a")
    one.clear()
    assert len(one.store) == 0


def test_a_damaged_page_is_a_miss_counted_and_removed(storage, x, caplog):
    one = backend(storage)
    one.set("a", flat(x))
    (name,) = one.store
    data = bytearray(one.store.get(name))
    data[-9] ^= 4
    one.store.put(name, data)
    place = torch.full((x.numel(),), 7.0).half()
    assert one.get("a", place) is None and (place == 7).all()
    assert one.stats()["damaged"] == 1 and not one.exists("a")
    assert "page a is damaged" in caplog.text


def test_what_is_not_finite_is_not_stored(storage, x, caplog):
    one = backend(storage)
    x[0, 1, 1, 5] = torch.inf
    assert not one.batch_set(["a", "b"], [flat(x), flat(x)])
    assert one.stats()["not_stored"] == 1 and len(one.store) == 0
    assert "page a is not stored" in caplog.text


def test_a_store_that_is_gone_raises_nothing(storage, x):
    one = backend(storage)
    one.close()
    assert not one.exists("a") and not one.set("a", flat(x))
    assert one.get("a", torch.empty(x.numel()).half()) is None
    assert (one.stats()["unreadable"], one.stats()["not_stored"]) == (2, 1)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"kvpact": {"spec": "int:bits=8"}}, SpecError, "lacks spec or store"),
        ({"interface_v1": 1}, SpecError, "leave it out"),
        ({"model": None}, SpecError, "no name of the model"),
        ({"kvpact": {"spec": "trellis:bits=4", "store": "memory://"}}, SpecError,
         "calibration='toy' can't be read"),
        ({"kvpact": {"spec": "trellis", "store": "memory://", "calibration": 4}}, SpecError,
         "the path of a file"),
        ({"kvpact": {"spec": "trellis", "store": "memory://", "calibration": "none"}}, SpecError,
         "can't be read"),
        ({"own": pool("page_last")}, GeometryError, "take layer_first, page_first"),
        ({"own": pool(v_head_dim=16)}, GeometryError, "unlike widths"),
        ({"own": pool(page_size=1)}, GeometryError, "larger --page-size"),
        ({"own": pool(dtype=torch.uint8)}, DtypeError, "in the model's dtype"),
        ({"kvpact": {"spec": "kivi:bits=2", "store": "memory://"}, "own": pool(page_size=48)},
         GeometryError, "--page-size, that is a multiple"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_refused(storage, given, error, words):
    with pytest.raises(error, match=words):
        backend(storage, **given)


def test_pools_beside_k_and_v_and_wrong_pages_are_refused(storage, x):
    one = backend(storage)
    with pytest.raises(GeometryError, match="pool mamba is not covered"):
        one.register_mem_host_pool_v2(pool(), "mamba")
    assert not one.set("a", flat(x)[:-1])
    with pytest.raises(KVPactError, match="register_mem_pool_host comes first"):
        storage.KVPactStorage(config()).exists("a")
    mla = config()
    mla.is_mla_model = True
    with pytest.raises(GeometryError, match="latents"):
        storage.KVPactStorage(mla)
    with pytest.raises(GeometryError, match="not covered"):
        PageLayout.of(SimpleNamespace(layout="layer_first", head_dim=32))
