"""The leaderboard: page, sentences and picture are the committed figures; others can join."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvpact.errors import RegistrationError
from kvpact.evaluate import Contender

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "leaderboard"
PAGE = ROOT / "docs" / "leaderboard.md"
PICTURES = sorted((ROOT / "docs" / "_static").glob("overview*.svg"))


@pytest.fixture
def found(module):
    """Return what is committed."""
    return module("leaderboard_table").load(RESULTS)


def test_the_page_has_the_committed_figures(module, found):
    table, text = module("leaderboard_table"), PAGE.read_text("utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    every = [row for one in found for row in one["rows"]]
    shared = sorted(set.intersection(*({step["tokens"] for step in r["steps"]} for r in every)))
    for one in found:
        for row in one["rows"]:
            steps = {step["tokens"]: step for step in row["steps"]}
            middle = shared[len(shared) // 2]
            bits = 32 * steps[middle]["bytes"] / steps[middle]["exact_bytes"]
            times = [steps[count]["ratio"][1] for count in shared] + [row["prompt"][1]]
            kl = [table.figure(row[name]) for name in ("kl_mean", "kl_se", "kl_p99")]
            other = f"{row['cache']} ({one['package']} {one['version']})"
            own = one["package"] == "kvpact" and "vLLM" not in row["cache"]
            name = f"**{row['cache']}**" if own else other
            wanted = [name, f"{kl[0]}\u00a0±\u00a0{kl[1]}"]
            wanted += [kl[2], f"{row['top1']:.1f}", *(f"{x:.2f}" for x in (bits, *times))]
            assert cells.count(wanted) == 1, wanted
    for one in found:
        failed = [row["reason"] for row in one["failed"]]
        told = [one["version"], one["changed"], one["note"], *failed]
        assert all(what in text for what in told)


def test_what_is_committed_is_whole(module, found):
    """Five packages of others at least were measured in one run on all models."""
    names = set(module("leaderboard_contenders").points())
    assert {path.stem for path in RESULTS.glob("*.json")} <= names
    runs: dict[str, list[str]] = {}
    models = {row["model"] for one in found for row in one["rows"]}
    kl_about = module("leaderboard_table").kl_about
    for model in models:  # the same tokens for all
        there = [one for one in found if any(row["model"] == model for row in one["rows"])]
        assert len({kl_about(one, model)["tokens"] for one in there}) == 1, model
    for one in found:
        assert re.fullmatch(r"\d+\.\d+\S*", one["version"]) and one["package"], one["package"]
        assert isinstance(one["changed"], str) and isinstance(one["note"], str)
        assert {"processor", "torch", "transformers", "load before", "run"} <= set(one["about"])
        assert one["about"]["threads"] == 1 and one["about"]["chunk"] == 256
        for row in one["rows"]:
            assert all(math.isfinite(row[name]) for name in ("kl_mean", "kl_se", "kl_p99"))
            spreads = [row["prompt"], *(step["ratio"] for step in row["steps"])]
            assert all(0 < low <= middle <= high for low, middle, high in spreads)
            assert [step["tokens"] for step in row["steps"]] == one["about"]["contexts"]
        if {row["model"] for row in one["rows"]} == models:
            runs.setdefault(one["about"]["run"], []).append(one["package"])
    assert any(len(set(run) - {"kvpact"}) >= 5 for run in runs.values())


def test_every_adapter_has_exact_versions(module):
    contenders = module("leaderboard_contenders")
    for name in contenders.points():
        one = contenders.contender(name)
        assert one.package == "kvpact" or one.package == "transformers" or one.requires, name


def test_the_pictures_show_the_committed_figures(module, found):
    picture = module("picture")
    rows = [row for row in module("leaderboard_table").rows_of(found) if row.model == "smollm2"]
    shown = picture.figures(rows)
    assert len(PICTURES) == 2
    for path in PICTURES:
        said = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
        assert json.loads(said.text) == json.loads(json.dumps(shown)), path.name


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
CODE = {
    "my_cache_row": next(block for block in BLOCKS if "Contender" in block),
    "my_cache": """
from transformers import DynamicCache

def MyCache(config, bits):
    return DynamicCache(config=config)
""",
    "my_broken": """
from kvpact.evaluate import Contender

def make(model):
    raise OSError("no such device\\nat all")

CONTENDER = Contender(package="my-cache", caches={"broken": make})
""",
}


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A package whose row is the file in docs/leaderboard.md, as an installer leaves it."""
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    info = tmp_path / "my_cache-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-cache\nVersion: 1.2\n")
    points = ("my-cache = my_cache_row:CONTENDER", "broken = my_broken:CONTENDER")
    entries = "\n".join(("[kvpact.leaderboard]", *points, "wrong = json:dumps", ""))
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_third_party_joins(module, third_party, model_folder, tmp_path):
    contenders, process = module("leaderboard_contenders"), module("leaderboard_process")
    one = contenders.contender("my-cache")
    assert isinstance(one, Contender) and contenders.installed("my-cache", one.requires) is None
    with pytest.raises(RegistrationError, match=r"no kvpact\.evaluate\.Contender"):
        contenders.contender("wrong")
    with pytest.raises(RegistrationError, match="no contender 'nobody'; there are"):
        contenders.contender("nobody")
    order = {"names": ["my-cache", "broken"], "models": [model_folder], "tokens": 320, "chunk": 128}
    order |= {"prompt": 200, "contexts": [256], "rounds": 2}
    threads = torch.get_num_threads()
    got = process.carried_out(**order)
    torch.set_num_threads(threads)
    (found,), (failed,) = got["my-cache"]["rows"], got["broken"]["failed"]
    assert got["my-cache"]["version"] == "1.2"
    assert got["my-cache"]["failed"] == got["broken"]["rows"] == []
    assert failed["cache"] == "broken" and failed["reason"] == "OSError: no such device"
    assert found["cache"] == "MyCache, 4 bits" and found["model"] == model_folder
    assert 0 <= found["kl_mean"] < 1e-9 and found["top1"] == 100
    (step,) = found["steps"]
    assert step["bytes"] == step["exact_bytes"] > 0 and step["tokens"] == 256


def test_a_prompt_is_one_call_on_an_empty_cache(module, model_folder, monkeypatch):
    from transformers import AutoModelForCausalLM, DynamicCache

    process = module("leaderboard_process")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    seen = []

    def timed(model, ids, cache, keep=1):
        seen.append((len(ids), cache.get_seq_length()))
        cache.update(*torch.zeros(2, 1, 1, len(ids), 4), 0)
        return float(len(seen)), None

    monkeypatch.setattr(process, "timed", timed)
    lane = process.Lane("one", "cache", lambda model: DynamicCache())
    work = process.Work(model, model, torch.arange(9), 9, 7, 4, [8], rounds=3)
    process.prompts([lane], work)
    assert seen == [(7, 0)] * 6  # the exact cache and the other one, three times
    assert lane.row["prompt"] == pytest.approx([19 / 15, 4 / 3, 5 / 3])
