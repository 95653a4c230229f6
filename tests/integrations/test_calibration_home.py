"""`calibration_of`: a calibration is found where it is kept, and made once where there is none."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig

from kvpact import CompressedCache, calibration_of
from kvpact.calibration import Calibration, LayerTokens, calibrate_layer
from kvpact.data import book_path
from kvpact.errors import SpecError, StoreError
from kvpact.geometry import CacheGeometry
from kvpact.integrations import calibrations
from kvpact.integrations.fingerprint import files_fingerprint, model_fingerprint
from kvpact.integrations.transformers import calibrate, prefix_cache
from kvpact.integrations.transformers.attention import learnt
from kvpact.integrations.transformers.versions import named
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore, StoreWarning

DEFAULT = parse_spec("trellis:bits=4")


class Letters:
    """A tokenizer of a hundred letters."""

    def __call__(self, text, max_length=None, **_):
        return {"input_ids": [3 + ord(letter) % 100 for letter in text][:max_length]}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations"


@pytest.fixture
def made(monkeypatch):
    """The specs of each calibration that was made."""
    counted = []

    def counting(model, rows, specs, **more):
        counted.append(specs)
        return calibrate(model, rows, specs, **more)

    monkeypatch.setattr(learnt, "calibrate", counting)
    return counted


@pytest.fixture
def model(make_model, sizes):
    return make_model(LlamaConfig(**sizes))


def states(calibration):
    return {i: dict(one.k) for i, one in calibration.layers.items()}


def equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = equal if isinstance(value, dict) else torch.equal
        assert same(value, other[name])
    return True


def test_it_is_made_once_and_is_what_calibrate_gives(model, made, home, capfd):
    first = calibration_of(model, tokenizer=Letters())
    assert "calibrating trellis:bits=4 to this model, once" in capfd.readouterr().err
    rows = learnt.text_rows(Letters(), [("book", book_path().read_text("utf-8"))])
    assert [len(row) for row in rows] == [2048] * 2
    assert equal(states(first), states(calibrate(model, rows, [DEFAULT])))
    assert equal(states(calibration_of(model)), states(first))
    assert len(made) == 1 and capfd.readouterr().err == ""
    assert len(list(home.rglob("*.kvcal"))) == 1


def test_other_weights_or_specs_have_their_own(model, made):
    calibration_of(model, "trellis:bits=4", tokenizer=Letters())
    calibration_of(model, "trellis:bits=3", tokenizer=Letters())  # learns the same
    assert len(made) == 1
    for spec in ("trellis:bits=4,sinks=0", "trellis:bits=6", "pca:bits=2"):
        calibration_of(model, spec, tokenizer=Letters())
    assert len(made) == 4
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.01)
    calibration_of(model, tokenizer=Letters())
    assert len(made) == 5


def test_a_damaged_one_is_made_again(model, made, home, capfd):
    first = calibration_of(model, tokenizer=Letters())
    (path,) = home.rglob("*.kvcal")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert equal(states(calibration_of(model, tokenizer=Letters())), states(first))
    assert len(made) == 2 and "is damaged" in capfd.readouterr().err


def test_of_several_at_once_one_makes_it(model, made):
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda _: calibration_of(model, tokenizer=Letters()), range(10)))
    assert len(made) == 1
    assert all(equal(states(found[0]), states(one)) for one in found)


def test_machines_that_share_a_store_share_the_calibration(model, made, monkeypatch, tmp_path):
    with MemoryStore() as store:
        first = calibration_of(model, tokenizer=Letters(), store=store)
        monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "another machine"))
        assert equal(states(calibration_of(model, store=store)), states(first))
    assert len(made) == 1


def test_a_store_that_can_not_write_leaves_a_machine_its_own(model, made, monkeypatch):
    def refuse(*_):
        raise StoreError("no room")

    with MemoryStore() as store:
        monkeypatch.setattr(store, "put", refuse)
        with pytest.warns(StoreWarning, match="no calibration: no room"):
            found = calibration_of(model, tokenizer=Letters(), store=store)
        assert equal(states(found), states(calibration_of(model)))
    assert len(made) == 1


def test_prefixes_of_the_default_spec_need_no_word(model, made):
    calibration_of(model, tokenizer=Letters())
    ids = torch.randint(3, 100, (1, 200), generator=torch.Generator().manual_seed(5))
    with MemoryStore() as store:
        cache = CompressedCache(model)
        prefix_cache(store, model, cache).prefill(ids)
        again = CompressedCache(model)
        assert prefix_cache(store, model, again).load(ids[0, :-1]) == 192
        with torch.no_grad():
            one, other = (model(ids[:, 192:], **named(x)).logits for x in (cache, again))
        exact = model(ids).logits[:, 192:]
        for logits in (one, other):
            assert (logits - exact).norm() < 0.2 * (exact - exact.mean()).norm()
        held = CompressedCache(model)
        model(ids, **named(held))
        with pytest.raises(SpecError, match="calibration_of"):
            prefix_cache(store, model, held)
    assert len(made) == 1


def test_it_is_found_by_the_models_files(tmp_path, home, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"weights")
    ran = []

    def run(command, **_):
        ran.append(command)
        layer = calibrate_tiny()
        layer.save(command[command.index("--out") + 1])
        return type("Ran", (), {"returncode": 0})

    def calibrate_tiny():
        k = torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(2))
        tokens = LayerTokens(k, k, k.square())
        return Calibration({0: calibrate_layer(tokens, [DEFAULT])})

    monkeypatch.setattr(calibrations.subprocess, "run", run)
    for _ in range(2):
        assert sorted(calibrations.of_files(folder, [DEFAULT]).layers) == [0]
    (command,) = ran
    assert command[1:6] == ["-m", "kvpact", "calibrate", str(folder), "--spec"]
    assert calibrations.found(files_fingerprint(folder, {}), [DEFAULT]) is not None
    (folder / "a.safetensors").write_bytes(b"others!")
    calibrations.of_files(folder, [DEFAULT])
    assert len(ran) == 2


def test_a_shipped_one_is_taken_of_the_same_weights_alone(model, made, monkeypatch, tmp_path):
    ready = calibrate(model, [torch.arange(3, 99).repeat(2)], [DEFAULT])
    (tmp_path / "own").mkdir()
    ready.save(tmp_path / "own" / f"{calibrations.name_of([DEFAULT])}.kvcal")
    numbers = sum(x.numel() for x in model.parameters())
    about = {"numbers": numbers, "loaded": learnt.loaded_fingerprint(model), "files": ""}
    for module in (learnt, calibrations):
        monkeypatch.setattr(module, "shipped_models", lambda: {"own": about})
    monkeypatch.setattr(calibrations, "calibrated", lambda: tmp_path)
    for model.config.eos_token_id in (2, 7):  # which changes no key
        found = calibration_of(model)
        assert equal(states(found), states(ready)) and found.model == model_fingerprint(model)
    calibration_of(model, "trellis:bits=4,sinks=0", tokenizer=Letters())  # is not shipped
    model.model.rotary_emb.inv_freq *= 2
    model.config.eos_token_id = 8
    calibration_of(model, tokenizer=Letters())
    model.model.rotary_emb.inv_freq /= 2
    model.lm_head.weight.data[0, 0] += 0.01
    calibration_of(model, tokenizer=Letters())
    assert len(made) == 3


@pytest.mark.parametrize("options", ["", ",sinks=0", ",center=0,sinks=0"])
@pytest.mark.parametrize(("name", "shape"), [("smollm2", (30, 3, 64)), ("gemma3", (3, 1, 256))])
def test_what_is_shipped_fits_the_default_spec_and_those_of_pages(name, shape, options):
    spec, known = parse_spec(f"trellis:bits=4{options}"), calibrations.shipped_models()[name]
    for fingerprint in (known["files"], known["loaded"]):
        held = calibrations.shipped(fingerprint, [spec])
        states = held.select(sorted(held.layers)).states([spec] * shape[0], CacheGeometry(*shape))
        assert len(held.layers) == len(states) == shape[0]


def test_what_can_not_be_had_is_said(model, tmp_path, monkeypatch):
    with pytest.raises(SpecError, match="tokenizer=tokenizer"):
        calibration_of(model)
    with pytest.raises(SpecError, match="learns nothing of a model"):
        calibration_of(model, "int:bits=8")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="set KVPACT_CACHE"):
        calibration_of(model, tokenizer=Letters())
