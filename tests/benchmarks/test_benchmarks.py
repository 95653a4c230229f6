"""The benchmarks run, on sizes that say nothing, and what they print and write hangs together."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvpact.cli.app import app
from kvpact.kernels.cpu.library import _load, library
from kvpact.recipe import layer_specs, load_recipe

native = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.fixture
def run(module, monkeypatch, capsys):
    """Run a script in this process, where torch is imported already; return what it prints."""
    threads = torch.get_num_threads()

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        module(name).main()
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def test_pages_against_the_contiguous_cache(run, module):
    sizes = ("--tokens", 96, "--rounds", 2, "--batches", 1, "--length", 64)
    rows = json.loads(run("paged", *sizes, "--json"))["rows"]
    assert len(rows) == 2 + 2 * 3 * len(module("paged").SPECS)
    for contiguous, paged in zip(rows[::2], rows[1::2], strict=True):
        assert contiguous["ratio"] == [1, 1, 1] and contiguous["work"] == paged["work"]
        assert min(paged["ms"], *paged["ratio"]) > 0


def test_import_times(run, module, monkeypatch):
    """On imports that are quick, under the names of those that are not."""
    names = zip(module("import_time").IMPORTS, ("json", "csv", "ast"), strict=True)
    quick = {name: f"import {x}" for name, x in names}
    monkeypatch.setattr(module("import_time"), "IMPORTS", quick)
    monkeypatch.setattr(module("import_time"), "COMMANDS", {"a": ["-c", "pass"]})
    printed = run("import_time", "--rounds", 1)
    rows = re.findall(r"^\| (\S.*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", printed, re.M)
    found = {name: [float(x) for x in numbers] for name, *numbers in rows}
    assert [*found] == [*quick, "a"] and all(a == b == c for a, b, c in found.values())
    said = float(re.search(r"beyond torch's own import: (-?[\d.]+) s", printed)[1])
    all_names, torch_own = found["from kvpact import *"][0], found["import torch"][0]
    assert said == pytest.approx(all_names - torch_own, abs=0.0016)


def test_the_first_token(run, module, model_folder, monkeypatch):
    def invoke(*command):
        return CliRunner().invoke(app, [*map(str, command[2:])], catch_exceptions=False).stdout

    monkeypatch.setattr(module("children"), "fresh", invoke)
    printed = run("first_token", "--model", model_folder, "--tokens", 600)
    rows = dict(
        re.findall(r"^\| (no store|empty store|prefix in the store) \| (.*) \|$", printed, re.M)
    )
    loaded = {name: float(row.split()[-1]) for name, row in rows.items()}
    assert loaded["no store"] == loaded["empty store"] == 0 < loaded["prefix in the store"] <= 600


@native
def test_encoding(run, tmp_path):
    size = ("--tokens", 32, "--long", 1056, "--rounds", 1)
    run("encode", "--specs", "polarquant", "turboquant:bits=4", *size, "--out", tmp_path)
    found = json.loads((tmp_path / "encode.json").read_text("utf-8"))
    # What has no native encoding is measured all the same, without a figure of one.
    timed = [(row["spec"], "native" in row, "ratio" in row) for row in found["many"]]
    assert timed == [("polarquant", False, False)] * 4 + [("turboquant:bits=4", True, True)] * 4
    assert {row["spec"] for row in found["decoded"]} == {"turboquant:bits=4"}
    assert [row["spec"] for row in found["one"]] == ["polarquant", "turboquant:bits=4"]
    lines = (tmp_path / "encode.md").read_text("utf-8").splitlines()
    tables = lines[lines.index("") :]
    first = [line.count("|") for line in tables if "| k |" in line or "| side" in line]
    assert set(first[: 1 + 4]) == {8}  # rows of the first table have its heading's columns


@native
def test_libraries(run):
    path = library().path
    size = ("--levels", "none", "--specs", "fp8", "--tokens", 64, "--rounds", 1)
    printed = run("libraries", path, *size)
    assert "KVPACT_SIMD=none, ms:" in printed and f"| installed | {path} |" in printed
    rows = re.findall(
        r"^\| fp8, (.+?) \| ([\d.]+) \(1\.00\) \| ([\d.]+) \(([\d.]+)\) \|$", printed, re.M
    )
    assert [row[0] for row in rows] == ["packing", "step", "chunk of 64"]
    assert all(float(x) > 0 for row in rows for x in row[1:])


def attention(run, folder, *more):
    """Run the benchmark of attention on next to nothing."""
    size = ("--rounds", 2, "--ring", 1, "--shapes", "B", "--threads", 1, "--no-compile")
    return run("attend", *size, *more, "--out", folder)


@native
def test_attention(run, module, tmp_path):
    printed = attention(run, tmp_path, "--tokens", 32, 96)
    written = json.loads((tmp_path / "attend.json").read_text("utf-8"))
    ours = module("attend_calls")
    found = {(row["tokens"], row["candidate"]): row for row in written["rows"]}
    for tokens in (32, 96):
        for name in ours.OURS:
            row, read = found[tokens, name], found[tokens, ours.read_name(name)]
            assert row["over_read"] == pytest.approx(row["ms"] / read["ms"])
            best = found[tokens, row["best_torch"]]
            assert row["times_best_torch"] == pytest.approx(best["ms"] / row["ms"])
            assert best["ms"] == min(
                row["ms"]
                for (count, name), row in found.items()
                if count == tokens and name.startswith(("sdpa", "matmul"))
            )
    table = (tmp_path / "attend.md").read_text("utf-8")
    assert table.count("| trellis 4 |") == printed.count("| trellis 4 |") == 2


@native
def test_attention_on_less_of_the_processor(run, tmp_path):
    before = dict(os.environ)
    printed = attention(run, tmp_path, "--tokens", 32, "--avx2", "--only", "4 bits")
    assert dict(os.environ) == before, "the other process' variables are set here"
    written = json.loads((tmp_path / "attend-avx2.json").read_text("utf-8"))
    assert written["about"]["level"] == "avx2" and "| 4 bits |" in printed
    names = {row["candidate"]: row for row in written["rows"]}
    best = names[names["4 bits"]["best_torch"]]
    assert names["4 bits"]["times_best_torch"] == pytest.approx(best["ms"] / names["4 bits"]["ms"])


@native
def test_linearity(run, tmp_path):
    size = ("--linearity", "--tokens", 32, 64, 128, "--only", "4 bits")
    printed = attention(run, tmp_path, *size)
    rows = json.loads((tmp_path / "linearity.json").read_text("utf-8"))["rows"]
    assert rows[0]["candidate"] == "4 bits" and len(rows) == 4
    assert all([p["tokens"] for p in row["points"]] == [32, 64, 128] for row in rows)
    assert printed.count("- B, 1 thread(s), ") == 4


def test_a_fixed_cost_is_linear_and_a_square_is_not(module):
    line = module("attend_linearity").line
    contexts = [1024 * 2**n for n in range(8)]
    straight = line({str(n): [2e-5 + 1e-7 * n] for n in contexts})
    assert straight["fixed_us"] == pytest.approx(20) and straight["off_line"] < 1e-9
    assert straight["ns_per_token"] == pytest.approx(100)
    # 20 us over 1,024 tokens beside 20 us over the two in the middle, 8,192 and 16,384
    middle = 100 + (20e3 / 8192 + 20e3 / 16384) / 2
    assert straight["off_median"] == pytest.approx((100 + 20e3 / 1024) / middle - 1)
    assert straight["off_median_at"] == 1024 and straight["flat_from"] == 2048
    assert line({str(n): [1e-7 * n**1.2] for n in contexts})["off_line"] > 0.15


@pytest.mark.slow
def test_a_real_model(run, model_folder, tmp_path):
    names = ("DynamicCache, fp32", "turboquant:bits=4, fp32")
    size = ("--tokens", 600, "--rounds", 2, "--threads", 1, "--only", *names)
    run("generate", "--model", model_folder, *size, "--out", tmp_path)
    written = json.loads((tmp_path / "generate.json").read_text("utf-8"))
    exact, ours = written["rows"]
    assert (exact["candidate"], ours["candidate"]) == names
    # Two layers, two heads, K and V of 32 channels.
    assert exact["cache"] == 600 * 2 * 2 * 2 * 32 * 4
    assert 0 < ours["cache"] < exact["cache"]
    ratio = exact["ms"] / ours["ms"]
    (line,) = written["lines"]
    assert f"; {ratio:.2f} x DynamicCache, fp32 (at least 1: " in line
    assert "turboquant:bits=4, fp32" in (tmp_path / "generate.md").read_text("utf-8")


@native
def test_prompts(run, tmp_path):
    size = ("--tokens", 40, "--past", 64, "--chunks", 8, "--shapes", "B", "--rounds", 2)
    printed = run("prompt", *size, "--threads", 1, 2, "--out", tmp_path)
    rows = json.loads((tmp_path / "prompt.json").read_text("utf-8"))["rows"]
    cases = [(0, 40, 1), (0, 40, 2), (64, 8, 1), (64, 8, 2)]
    assert [(row["past"], row["new"], row["threads"]) for row in rows] == cases
    for row in rows:
        assert row["ratios"]["sdpa"] == pytest.approx(row["ms"]["sdpa"] / row["ms"]["kvpact"])
        assert ("sdpa, no mask" in row["ms"]) == (row["past"] > 0)
    report = (tmp_path / "prompt.md").read_text("utf-8")
    assert all(line in printed for line in report.splitlines()[-4:])


@native
def test_anchors_without_other_packages(run, module, tmp_path):
    size = ("--tokens", 128, 256, "--queries", 1, 8, "--shapes", "C", "--threads", 1)
    run("anchors", "--peers", "kept", *size, "--rounds", 1, "--ring", 0, "--out", tmp_path)
    rows = json.loads((tmp_path / "anchors.json").read_text("utf-8"))["rows"]
    most = {"torch fp32": 1e-6, "torch bf16": 0.02, "int:bits=8": 0.02}
    most |= dict.fromkeys(module("anchors_kept").SPECS[1:], 0.2)
    assert len(rows) == 2 * 2 * len(most) and {row["what"] for row in rows} == set(most)
    assert all(0 < row["error"] < most[row["what"]] and row["ms"] > 0 for row in rows)
    table = (tmp_path / "anchors.md").read_text("utf-8")
    assert table.count("9/3 x 64") == 4 and table.count("**") == 2 * 4 * 3


@native
def test_many_query_rows(run, tmp_path):
    size = ("--tokens", 64, "--rounds", 2, "--queries", 2, 40, "--threads", 1, "--ring", 0)
    run("rows", *size, "--specs", "int:bits=8", "--out", tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    wanted = [(shape, taken) for shape in ("A", "B") for taken in ("few", "many")]
    assert [(row["shape"], row["taken"]) for row in rows] == wanted + [("MLA", "many")] * 2
    for row in rows:
        assert set(row["ms"]) == {"torch", "many"} | ({"few"} if row["shape"] != "MLA" else set())
        assert all(ms > 0 for ms in row["ms"].values())
    assert len(re.findall(r"^\| \d+ \|", (tmp_path / "rows.md").read_text(), re.M)) == 6


def test_latency_beside_dynamic_cache(run, model_folder, tmp_path):
    sizes = ("--prompts", 24, "--held", 16, "--rounds", 2, "--steps", 4, "--threads", 1)
    printed = run("latency", "--model", model_folder, *sizes, "--out", tmp_path)
    rows = json.loads((tmp_path / "latency.json").read_text("utf-8"))["rows"]
    assert [(row["what"], row["tokens"]) for row in rows] == [("prompt", 24), ("step", 16)]
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["ratio"] <= high and min(row["ms"]) > 0
    assert (tmp_path / "latency.md").read_text("utf-8").strip() in printed


def test_recommendations_of_a_small_model(run, model_folder, tmp_path):
    text = tmp_path / "text"
    text.write_text("It was a dark and stormy night; the rain fell in torrents. " * 8, "utf-8")
    options = "--model", model_folder, "--text", text, "--tokens", 330, "--out", tmp_path
    printed = run("recommend", *options, "--threads", 1)
    rows = json.loads((tmp_path / "recommend.json").read_text("utf-8"))
    specs = [row["spec"].removeprefix("recipe within ") for row in rows]
    assert specs == [f"trellis:bits={bits}" for bits in (2, 2, 3, 3, 4, 4)]
    for uniform, recipe in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < recipe["share"] <= uniform["share"] < 1
        assert recipe["difference"] == pytest.approx(recipe["measured"] - uniform["measured"])
        assert min(uniform["predicted"], recipe["predicted"]) > 0
    assert (tmp_path / "recommend.md").read_text("utf-8") in printed


def test_recipes_of_a_small_model(run, model_folder, tmp_path):
    options = "--model", model_folder, "--tokens", 330, "--out", tmp_path, "--threads", 1
    printed = run("recipes", *options)
    for size in ("2.5bit", "3bit", "4bit"):
        path = tmp_path / f"{Path(model_folder).name}-{size}.toml"
        assert path.read_text("utf-8") in printed
        recipe = load_recipe(path)
        assert len(layer_specs(path, 2)) == recipe["num_layers"] == 2
        rows = recipe["measured"]["rows"]
        assert [row["text"] for row in rows] == ["novel", "novel", "topics", "topics"]
        assert ["kl_predicted" in row for row in rows] == [True, True, False, False]
        assert all(row["kl"] > 0 and 0 < row["percent"] < 100 for row in rows)


def test_the_share_of_storing(run, model_folder, tmp_path):
    sizes = ("--tokens", 200, "--rounds", 2, "--threads", 1, "--spec", "trellis:bits=4")
    printed = run("prompt_share", "--model", model_folder, *sizes, "--out", tmp_path)
    (row,) = json.loads((tmp_path / "prompt_share.json").read_text("utf-8"))["rows"]
    assert 0 < row["encoding_ms"] < row["storing_ms"] < row["prompt_ms"] and row["tokens"] == 200
    for name in ("encoding", "storing"):
        low, middle, high = row[name]
        assert 0 < low <= middle <= high < 1
    assert (tmp_path / "prompt_share.md").read_text("utf-8").strip() in printed


def test_what_runs_on_a_gpu(run, tmp_path):
    sizes = ("--tokens", 64, "--batch", 1, "--rounds", 1, "--specs", "turboquant:bits=4")
    parts = ("--parts", "decode", "latent", "prompt", "encode")
    printed = run("gpu", "--dry", *sizes, *parts, "--out", tmp_path)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"decode", "latent", "chunk", "encode"}
    assert all(row["us"] > 0 and row["what"] in printed for row in rows)
