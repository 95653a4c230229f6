"""What LMCache calls, over stand-ins of its buffers; LMCache itself runs in tests/engines."""

import builtins
import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kvpact import errors
from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache import main, register, server
from kvpact.integrations.lmcache.layout import ChunkLayout
from kvpact.integrations.lmcache.server import KVPactSerde, Served, StatusModule, key_hash
from kvpact.stores.records import seal, unseal
from kvpact.testing.held import same_bytes

KEY = SimpleNamespace(
    chunk_hash=b"\xab\xcd", model_name="toy", kv_rank=1, object_group_id=0, cache_salt=""
)
OPTIONS = {"spec": "turboquant:bits=4", "head_dim": 32}
SHAPE = (2, 64, 3 * 64)


class Buffer:
    """A piece of LMCache's memory."""

    def __init__(self, *tensors):
        self.tensors = tensors

    @property
    def byte_array(self):
        (data,) = self.tensors
        return memoryview(data.numpy())

    def get_size(self):
        return sum(x.nbytes for x in self.tensors)

    def get_shapes(self):
        return [x.shape for x in self.tensors]

    def get_tensor(self, index):
        return self.tensors[index]


def described(*tensors):
    return SimpleNamespace(shapes=[x.shape for x in tensors], dtypes=[x.dtype for x in tensors])


def stored(serde, x, key=KEY):
    """Return the buffer that a chunk is stored in, all of it written."""
    size = serde.estimate_serialized_size(described(x))
    data = Buffer(torch.full((size,), 255, dtype=torch.uint8))
    assert serde.serialize(Buffer(x), data, key) == size
    return data


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """The serdes of the process; each test has its own."""
    monkeypatch.setattr(server, "_SERVED", Served())


@pytest.fixture
def removed():
    return []


@pytest.fixture
def serde(removed):
    return KVPactSerde(ChunkFormat(OPTIONS["spec"], ChunkLayout(32, 32)), removed.append)


@pytest.fixture
def x():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).half()


def test_chunks_are_counted(serde, removed, x):
    data, again = stored(serde, x), Buffer(torch.zeros_like(x))
    serde.deserialize(data, again, KEY)
    assert 0.05 < (again.tensors[0] - x).float().norm() / x.float().norm() < 0.11
    assert serde.stats() == {
        "spec": "turboquant:bits=4,sinks=0,window=0", "stored": 1, "stored_bytes": data.get_size(),
        "given_bytes": x.nbytes, "not_stored": 0, "loaded": 1, "damaged": 0, "mismatched": 0,
    }  # fmt: skip
    assert not removed


def test_a_damaged_chunk_is_counted_told_and_removed(serde, removed, x, caplog):
    data, again = stored(serde, x), Buffer(torch.ones_like(x))
    data.tensors[0][1000] ^= 4
    with pytest.raises(errors.IntegrityError):
        serde.deserialize(data, again, KEY)
    assert same_bytes(again.tensors[0], torch.ones_like(x))
    assert (serde.stats()["damaged"], serde.stats()["loaded"]) == (1, 0)
    assert removed == [KEY]
    assert "chunk abcd of toy is computed again" in caplog.text


def test_a_chunk_of_another_spec_is_removed(serde, removed, x):
    other = KVPactSerde(ChunkFormat("int:bits=8", ChunkLayout(32, 32)), removed.append)
    with pytest.raises(errors.MismatchError):
        serde.deserialize(stored(other, x), Buffer(x.clone()), KEY)
    assert (serde.stats()["mismatched"], serde.stats()["damaged"]) == (1, 0)
    assert removed == [KEY]


def test_a_chunk_of_a_later_version_is_left_alone(serde, removed, x):
    name = key_hash(KEY)
    blob = unseal(name, bytes(stored(serde, x).byte_array)).blob
    later = bytes(blob).replace(b'"version":"1"', b'"version":"2"')
    header, rest = seal(name, memoryview(later), 0.0)
    data = Buffer(torch.frombuffer(bytearray(header + rest), dtype=torch.uint8))
    with pytest.raises(errors.FormatError):
        serde.deserialize(data, Buffer(x.clone()), KEY)
    assert serde.stats()["mismatched"] == 1
    assert not removed


def test_a_server_with_wrong_widths_removes_nothing(serde, removed, x):
    other = KVPactSerde(ChunkFormat("int:bits=8", ChunkLayout(36, 36)), removed.append)
    assert other.estimate_serialized_size(described(x)) == 1
    first = Buffer(stored(serde, x).tensors[0][:1])  # as many bytes as it asks for
    with pytest.raises(errors.GeometryError):
        other.deserialize(first, Buffer(x.clone()), KEY)
    assert (other.stats()["mismatched"], other.stats()["damaged"]) == (1, 0)
    assert not removed


def test_a_method_that_is_not_there_is_left_alone(serde, removed, x, monkeypatch):
    data = stored(serde, x)

    def gone(_):
        raise errors.SpecError("unknown method 'turboquant'")

    monkeypatch.setattr("kvpact.spec.Spec.from_json", gone)
    with pytest.raises(errors.SpecError):
        serde.deserialize(data, Buffer(x.clone()), KEY)
    assert serde.stats()["mismatched"] == 1
    assert not removed


def test_what_can_not_be_packed_is_refused_when_it_is_stored_and_said_once(serde, caplog):
    x = torch.zeros(2, 64, 100, dtype=torch.float16)
    for _ in range(2):
        assert serde.estimate_serialized_size(described(x)) == 1
    assert caplog.text.count("stores nothing of this engine") == 1
    with pytest.raises(errors.GeometryError, match="set the widths of the model's heads"):
        serde.serialize(Buffer(x), Buffer(torch.zeros(1, dtype=torch.uint8)), KEY)
    assert serde.stats()["not_stored"] == 1


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"spec": "int:bits=8"}, errors.SpecError, r"\['head_dim'\] missing; write "),
    ({"head_dim": 64}, errors.SpecError, r"\['spec'\] missing"),
    ({**OPTIONS, "bits": 4}, errors.SpecError, r"\['bits'\] unknown"),
    ({**OPTIONS, "spec": 4}, errors.SpecError, "a spec is text"),
    ({**OPTIONS, "spec": "vq"}, errors.SpecError, "learns from its tokens"),
    ({**OPTIONS, "head_dim": "64"}, errors.GeometryError, "should be the width of a head"),
    ({**OPTIONS, "cpu_block_size": "32"}, errors.GeometryError, "should be vLLM's --block-size"),
])  # fmt: skip
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Served().make(options)


class Adapter:
    def __init__(self, options):
        config = None if options is None else SimpleNamespace(kwargs=options)
        self.about, self.deleted = SimpleNamespace(config=SimpleNamespace(serde_config=config)), []

    def delete(self, keys):
        self.deleted += keys


def test_entries_are_removed_from_the_adapter_that_gave_them(x):
    served, mine, other = Served(), dict(OPTIONS), dict(OPTIONS)
    serde = served.make(mine)
    data = stored(serde, x)
    data.tensors[0][-1] ^= 1
    adapters = [Adapter(None), Adapter(other), Adapter(mine)]
    manager = SimpleNamespace(l2_adapters=lambda: [(a.about, a) for a in adapters])
    with pytest.raises(errors.IntegrityError):  # before there is a server
        serde.deserialize(data, Buffer(x.clone()), KEY)
    served.server = SimpleNamespace(storage_manager=manager)
    with pytest.raises(errors.IntegrityError):
        serde.deserialize(data, Buffer(x.clone()), KEY)
    assert [a.deleted for a in adapters] == [[], [], [KEY]]


def test_the_servers_status_has_the_counts(x):
    served = Served()
    stored(served.make(dict(OPTIONS)), x)
    module = StatusModule(served, "the server")
    assert module.context == "the server"
    assert [one["stored"] for one in module.report_status()["kvpact"]] == [1]
    module.close()
    context = SimpleNamespace(storage_manager=None)
    assert server.build_server_modules(SimpleNamespace(server_context=context)).context is context


def test_missing_engines_are_named(monkeypatch):
    found = builtins.__import__

    def missing(name, *rest):
        if name.partition(".")[0] in ("lmcache", "vllm"):
            raise ImportError(f"no {name}")
        return found(name, *rest)

    monkeypatch.delitem(sys.modules, "kvpact.integrations.vllm.cpu_attention", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(errors.BackendUnavailable, match=r"pip install 'kvpact\[lmcache\]'"):
        register()
    with pytest.raises(errors.BackendUnavailable, match="vLLM can't be imported here"):
        Served().make({**OPTIONS, "cpu_block_size": 32})


@pytest.fixture
def lmcache(monkeypatch):
    """Modules with what the launcher calls of LMCache."""
    seen = SimpleNamespace(factories={}, argv=None, loggers=[])

    def run(argv):
        seen.argv = argv

    parts = {
        "lmcache": {"torch_device_type": "cuda"},
        "lmcache.v1.distributed.serde": {
            "get_registered_serde_types": lambda: list(seen.factories),
            "register_serde_factory": seen.factories.__setitem__,
            "AsyncSerdeProcessor": lambda *serdes, max_workers: (*serdes, max_workers),
        },
        "lmcache.cli.main": {"main": run},
        "lmcache.logging": {"init_logger": seen.loggers.append},
    }
    for path, names in parts.items():
        steps = path.split(".")
        for end in range(1, len(steps) + 1):
            name = ".".join(steps[:end])
            if name not in sys.modules or name == path:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
    return seen


def test_the_launcher_adds_its_module_to_a_server(lmcache):
    main(["server", "--port", "1"])
    *given, option, value = lmcache.argv
    assert (given, option) == (["server", "--port", "1"], "--server-module")
    assert json.loads(value) == {"module_path": "kvpact.integrations.lmcache.server"}
    assert callable(server.build_server_modules)  # the name that LMCache looks for
    main(["ping"])
    assert lmcache.argv == ["ping"]
    assert list(lmcache.factories) == ["kvpact"]


def test_the_factory_makes_one_object_for_both_ways(lmcache):
    register()
    one, other, workers = lmcache.factories["kvpact"]({**OPTIONS, "max_workers": 3})
    assert one is other
    assert workers == 3
    with pytest.raises(errors.SpecError, match="max_workers='3' should be a number of threads"):
        lmcache.factories["kvpact"]({**OPTIONS, "max_workers": "3"})


def test_without_accelerator_what_lies_in_chunks_has_to_be_said(lmcache, monkeypatch):
    monkeypatch.setattr(sys.modules["lmcache"], "torch_device_type", "cpu")
    register()
    with pytest.raises(errors.SpecError, match="on a machine without accelerator"):
        lmcache.factories["kvpact"](dict(OPTIONS))
    serde, *_ = lmcache.factories["kvpact"]({**OPTIONS, "cpu_block_size": 0})
    assert serde.chunks.layout.pages is None


@pytest.mark.parametrize(("told", "refused"), [({"head_dim": 32}, False), ({}, True)])
def test_widths_that_are_not_the_models_are_refused(serde, x, tmp_path, caplog, told, refused):
    """They divide the chunk, so its shape alone does not tell; without `head_dim` they are 64."""
    sizes = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**sizes, "num_key_value_heads": 2, "hidden_size": 256, **told}
    (tmp_path / "config.json").write_text(json.dumps(config))
    key = SimpleNamespace(**{**vars(KEY), "model_name": str(tmp_path)})
    if not refused:
        serde.deserialize(stored(serde, x, key), Buffer(x.clone()), key)
        return
    for _ in range(2):
        with pytest.raises(errors.GeometryError, match="have the widths 64 and 64: set these"):
            stored(serde, x, key)
    assert serde.stats()["not_stored"] == 2
    assert caplog.text.count("kvpact stores nothing of this engine") == 1
    with pytest.raises(errors.GeometryError):
        serde.deserialize(stored(serde, x), Buffer(x.clone()), key)
