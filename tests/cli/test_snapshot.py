"""``kvpact snapshot`` and ``generate --prefix-store`` on a tiny saved model."""

import json

import pytest
import torch
from commands import bad, passed
from tiny_configs import gemma3
from tiny_llama import ascii_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpact import CacheGeometry, Snapshot, create_cache
from kvpact.snapshot import Identity

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, and so on."


@pytest.fixture(scope="module")
def saved(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "a.safetensors"
    options = ("--spec", "turboquant:bits=4", "--model", model_folder, "--chunk", 20)
    result = passed("snapshot", "save", TEXT, "--out", path, *options, "--tenant", "alice")
    assert f" {len(TEXT)} " in result.stdout
    return path


def test_save_and_show(saved, monkeypatch):
    monkeypatch.setattr(Snapshot, "layer", None)  # no tensor is read
    shown = passed("snapshot", "show", saved).stdout
    for text in ("turboquant:bits=4", "alice", "float32", "packed slots", "window"):
        assert text in shown
    lines = [line for line in shown.splitlines() if line.split()]
    rows = {line.split("  ")[0].strip(): line.split()[-1] for line in lines}
    assert rows["tokens"] == str(len(TEXT)) and rows["layers"] == "2" and rows["KV heads"] == "2"
    data = json.loads(passed("snapshot", "show", saved, "--json").stdout)
    assert data["identity"]["tenant"] == "alice" and len(data["identity"]["model"]) == 64
    held = Snapshot.open(saved)
    assert sum(held.sizes().values()) == held.nbytes == saved.stat().st_size
    assert held.sizes()["token ids"] == 4 * len(TEXT)
    assert held.sizes()["sinks"] == 2 * 2 * 2 * 4 * 32 * 4


def test_verify(saved, tmp_path):
    result = passed("snapshot", "verify", saved, saved)
    assert result.stdout.count("good") == 2 and result.stderr == ""
    data = bytearray(saved.read_bytes())
    data[-1] ^= 1
    broken = tmp_path / "broken"
    broken.write_bytes(data)
    told = bad("snapshot", "verify", saved, broken)
    assert f"{broken}: " in told and "was changed" in told
    broken.write_bytes(data[:-1])
    bad("snapshot", "verify", broken)
    assert "No such file" in bad("snapshot", "verify", tmp_path / "none")


@pytest.mark.parametrize("more", [(), ("--sliding", "int:bits=8,window=0")])
def test_a_model_with_windows_goes_on_as_generate_does(tmp_path, more):
    """Its last token can't be taken back: it is computed when the snapshot is restored."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "eos_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ("sliding", "full", "sliding", "full")
    model = AutoModelForCausalLM.from_config(gemma3({**sizes, **heads}, *kinds))
    model.save_pretrained(tmp_path)
    ascii_tokenizer().save_pretrained(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('default = "int:bits=8"\n[layers]\n3 = "fp8"\n')
    options = ("--model", tmp_path, "--max-new-tokens", 12)
    given = ("--spec", recipe, "--model", tmp_path, *more)
    passed("snapshot", "save", TEXT, "--out", tmp_path / "a", *given)
    assert Snapshot.load(tmp_path / "a").tokens == len(TEXT) - 1
    on = passed("snapshot", "restore", tmp_path / "a", *options).stdout
    whole = passed("generate", TEXT, "--spec", recipe, *options, *more).stdout
    names = {record.name for record in Snapshot.load(tmp_path / "a").records()}
    assert names == ({"packed_ring"} if more else {"keys", "values"})
    assert len(on) > 6 and whole.startswith(on)


def test_restore_goes_on_as_generate_does(saved, model_folder):
    options = ("--model", model_folder, "--max-new-tokens", 12)
    spec = ("--spec", "turboquant:bits=4")
    whole = passed("generate", TEXT, *options, *spec, "--chunk", 20).stdout
    on = passed("snapshot", "restore", saved, "--tenant", "alice", *options)
    assert "tokens restored" in on.stderr
    assert len(on.stdout.rstrip("\n")) == 12
    assert whole.startswith(on.stdout.rstrip("\n"))
    more = passed("snapshot", "restore", saved, " And then", "--tenant", "alice", *options).stdout
    assert len(more.rstrip("\n")) == 12


def test_restore_refuses_other_models_and_tenants(saved, model_folder, tmp_path):
    options = ("--max-new-tokens", 2)
    refused = bad("snapshot", "restore", saved, "--model", model_folder, *options)
    assert "tenant is 'alice', not None" in refused
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    refused = bad("snapshot", "restore", saved, "--model", tmp_path, "--tenant", "alice", *options)
    assert "snapshot's model is" in refused
    broken = tmp_path / "broken"
    broken.write_bytes(saved.read_bytes()[:-5])
    bad("snapshot", "restore", broken, "--model", model_folder)


@pytest.mark.parametrize(("name", "shown"), [
    ("[/x]", "[/x]"),
    ("[red]a[/red]\\", "[red]a[/red]\\"),
    ("a\x1b]0;owned\x07b", r"a\x1b]0;owned\x07b"),
    ("a\u202eb\x9bc\nd", r"a\u202eb\x9bc\nd"),
])  # fmt: skip
def test_what_a_snapshot_says_does_not_steer_the_terminal(name, shown, model_folder, tmp_path):
    """Its maker chooses the names: they are printed as they stand, and nothing else."""
    cache = create_cache("int:bits=4", CacheGeometry(1, 1, 4))
    cache.prefill(0, torch.zeros(1, 1, 3, 4).half(), torch.zeros(1, 1, 3, 4).half())
    ids = torch.arange(3)[None]
    path = tmp_path / "named [b] {0}\x1b.kv"
    cache.snapshot(token_ids=ids, identity=Identity(model=name, tenant=name)).save(path)
    result = passed("snapshot", "show", path)
    for row in ("model", "tenant"):
        cells = next(x.split() for x in result.stdout.splitlines() if x.split()[:1] == [row])
        assert cells == [row, shown]
    assert r"named [b] {0}\x1b.kv" in result.stdout
    checked = passed("snapshot", "verify", path)
    assert r"{0}\x1b.kv: good" in checked.stdout
    refused = bad("snapshot", "restore", path, "--model", model_folder)
    assert "snapshot's model is" in refused and shown in refused.replace("\\\\", "\\")
    missing = bad("snapshot", "show", tmp_path / "\x1b[31mno")
    for text in (result.output, checked.output, refused, missing):
        assert all(c.isprintable() or c == "\n" for c in text)


def test_save_refuses_what_it_cannot_hold(model_folder, tmp_path):
    given = ("--out", tmp_path / "a", "--model", model_folder)
    assert "nothing to hold" in bad("snapshot", "save", *given)
    assert "1025 tokens do not fit" in bad("snapshot", "save", "x" * 1025, *given)
    for args in ((tmp_path / "a", "--spec", "nonesuch"), (tmp_path / "no" / "a",)):
        refused = bad("snapshot", "save", "x", "--out", *args)
        assert "loading" not in refused, "told before a model is loaded"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("snapshot", "save", "x"), ("calibrate",)])
def test_no_file_of_a_user_is_replaced_unless_forced(model_folder, tmp_path, command):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    options = (model_folder,) if command == ("calibrate",) else ("--model", model_folder)
    refused = bad(*command, *options, "--out", notes)
    assert "notes.txt is there and is no" in refused and "--force" in refused
    assert notes.read_text() == "mine" and "loading" not in refused
    passed("snapshot", "save", "x", "--model", model_folder, "--out", notes, "--force")
    passed("snapshot", "save", "xy", "--model", model_folder, "--out", notes)
    assert Snapshot.load(notes).tokens == 2


def figure(output, name):
    return next(line.split()[-1] for line in output.splitlines() if name in line)


def test_generate_with_a_prefix_store(model_folder, tmp_path):
    store = tmp_path / "store"
    options = ("--model", model_folder, "--max-new-tokens", 6, "--spec", "none")
    plain = passed("generate", TEXT, *options).stdout
    assert "first token" in plain and "from the store" not in plain
    texts = {plain.splitlines()[0]}
    for count, (loaded, written) in enumerate(((0, 64), (64, 0), (64, 0))):
        result = passed("generate", TEXT, *options, "--prefix-store", store)
        assert figure(result.stdout, "from the store") == str(loaded), count
        assert figure(result.stdout, "saved to the store") == str(written)
        texts.add(result.stdout.splitlines()[0])
    assert len(texts) == 1, "an exact prefix changes nothing"
    other = passed("generate", TEXT, *options, "--prefix-store", store, "--tenant", "bob").stdout
    assert figure(other, "from the store") == "0"
    longer = passed("generate", TEXT * 2, *options, "--prefix-store", store).stdout
    assert figure(longer, "from the store") == "64" and figure(longer, "saved to") == "64"
    # The store's own commands see the chunks: two tenants, and the longer text's second one.
    assert len(passed("store", "ls", store).stdout.split()) == 3
    assert " 3 " in passed("store", "stats", store).stdout
    passed("store", "gc", store, "--verify")
    assert len(passed("store", "ls", store).stdout.split()) == 3
    passed("store", "gc", store, "--max-bytes", 1)
    again = passed("generate", TEXT, *options, "--prefix-store", store).stdout
    assert figure(again, "from the store") == "0" and figure(again, "saved to") == "64"


def test_a_store_that_can_not_be_reached_costs_nothing_but_time(model_folder):
    pytest.importorskip("redis")
    options = ("--model", model_folder, "--spec", "none", "--max-new-tokens", 3, "--prefix-store")
    result = passed("generate", TEXT, *options, "redis://127.0.0.1:1")
    assert "the prefix was not saved" in result.stderr
    assert figure(result.stdout, "from the store") == "0"


def test_prefixes_of_methods_that_learn_calibrate_them_once(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "home"))
    options = ("--model", model_folder, "--max-new-tokens", 3, "--prefix-store", tmp_path / "store")
    first = passed("generate", TEXT * 3, *options)
    assert "calibrating trellis:bits=4 to this model, once" in first.stderr
    second = passed("generate", TEXT * 3, *options)
    assert "calibrat" not in second.stderr
    assert int(figure(second.stdout, "from the store")) >= 64
