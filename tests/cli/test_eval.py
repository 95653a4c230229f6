"""`kvpact eval` on a tiny saved model: tables and files."""

import json
import platform
from pathlib import Path

from commands import bad, good, invoke
from PIL import Image
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvpact.cli.eval_run import known_cautions
from kvpact.data import book_path


def test_eval_prints_a_table_and_writes_three_files(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(book_path().read_text("utf-8")[:500], encoding="utf-8")
    out = good(
        "eval", "fp8", "int:bits=4", "--text", text, "--tokens", 300, "--chunk", 128,
        "--model", model_folder, "--out", tmp_path / "out", "--threads", 1, "--verbose",
    )  # fmt: skip
    rows = json.loads((tmp_path / "out" / "eval.json").read_text("utf-8"))
    assert [row["spec"] for row in rows] == ["none", "fp8", "int:bits=4"]
    assert rows[0]["kl_mean"] <= 1e-9 < rows[1]["kl_mean"] < rows[2]["kl_mean"]
    for words in ("int:bits=4", "perplex", "300 tokens of text.txt", "171 scored", "eval.png"):
        assert words in out
    assert out.startswith("fp8: no verdict, KL ") and "; write CompressedCache(model, " in out
    assert "first chunk left out" in (tmp_path / "out" / "eval.md").read_text("utf-8")
    with Image.open(tmp_path / "out" / "eval.png") as image:
        assert image.size == (1500, 960)
    shares = [row["share"] for row in rows]
    assert shares[0] == 1 and 1 > shares[1] > shares[2] > 0.28


def test_results_replace_no_other_files(model_folder, tmp_path):
    (tmp_path / "eval.md").write_text("mine", encoding="utf-8")
    args = ("eval", "int:bits=4", "--tokens", 100, "--chunk", 40, "--model", model_folder)
    assert "eval.md is there and was not written by kvpact" in bad(*args, "--out", tmp_path)
    assert (tmp_path / "eval.md").read_text("utf-8") == "mine"
    good(*args, "--out", tmp_path, "--force")
    good(*args, "--out", tmp_path)


def test_eval_says_when_the_text_is_shorter_than_asked_for(model_folder, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("a short text " * 10, encoding="utf-8")
    sizes = ("--tokens", 400, "--chunk", 64)
    result = invoke("eval", "none", "2", "--text", text, *sizes, "--model", model_folder)
    assert result.exit_code == 0 and "2, a number alone, is a spec" in result.stderr
    assert "the text has 130 tokens, fewer than the 400 asked for" in result.stderr


def test_ablation_and_packed_only_mark_their_rows(model_folder):
    args = ("eval", "int:bits=3", "--tokens", 200, "--chunk", 64, "--model", model_folder)
    out = good(*args, "--ablation")
    assert "int:bits=3,sinks=0,window=0" in out and "int:bits=3 (packed only)" in out
    out = good(*args, "--packed-only")
    assert "int:bits=3 (packed only)" in out and "none (packed only)" not in out


def test_eval_of_two_texts_compares_and_summarises(model_folder, tmp_path):
    book = book_path().read_text("utf-8")
    for name, start in (("first.txt", 0), ("second.txt", 5000)):
        (tmp_path / name).write_text(book[start : start + 400], encoding="utf-8")
    out = good(
        "eval", "int:bits=4", "int:bits=3", "--text", tmp_path / "first.txt",
        "--text", tmp_path / "second.txt", "--tokens", 200, "--chunk", 64,
        "--model", model_folder, "--against", "int:bits=3", "--out", tmp_path / "out",
    )  # fmt: skip
    for words in (
        "on first.txt",
        "on second.txt",
        "int:bits=4 against int:bits=3, on the same tokens: KL ",
        "all 2 runs",
    ):
        assert words in out
    rows = json.loads((tmp_path / "out" / "eval.json").read_text("utf-8"))
    assert [row["text"] for row in rows] == ["first.txt"] * 3 + ["second.txt"] * 3
    assert rows[1]["kl_difference"] < 0 and rows[1]["against"] == "int:bits=3"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    found = [(row["spec"], row["better"], row["worse"]) for row in summary]
    assert found == [("int:bits=4", 2, 0), ("int:bits=3", 0, 0)]


def test_eval_free_running(model_folder, tmp_path):
    out = good(
        "eval", "none", "int:bits=2", "--tokens", 100, "--chunk", 40, "--free-running", 12,
        "--model", model_folder, "--out", tmp_path,
    )  # fmt: skip
    for words in ("first divergence", "none in 12", "continues 100 tokens", "free_running.png"):
        assert words in out
    (data,) = json.loads((tmp_path / "free_running.json").read_text("utf-8"))
    assert len(data["rows"][1]["kl"]) == 12 and len(data["text"]) == 12


def test_eval_tasks(model_folder, tmp_path):
    out = good(
        "eval", "int:bits=2", "--tokens", 900, "--chunk", 256, "--tasks",
        "needle,variables,common words,key-value", "--task-samples", 1,
        "--seed", 4, "--model", model_folder, "--out", tmp_path,
    )  # fmt: skip
    for words in (
        "exact: log-probability", "key-value", "20 questions", "with seed 4", "tasks.png",
    ):  # fmt: skip
        assert words in out
    (data,) = json.loads((tmp_path / "tasks.json").read_text("utf-8"))
    assert data["seed"] == 4 and len(data["scores"]) == 20


def test_what_is_known_to_do_badly_is_told(model_folder):
    """Once for all specs that are meant, and not of a spec of the ablation's own making."""
    sizes = ("--tokens", 100, "--chunk", 40, "--model", model_folder)
    result = invoke("eval", "int:bits=4", "int:bits=3", "trellis:bits=4", "--ablation", *sizes)
    assert result.exit_code == 0
    told = [line for line in result.stderr.splitlines() if "trellis:bits=4" in line]
    assert len(told) == 1 and told[0].startswith("int:bits=4, int:bits=3: plain integers")
    assert "sinks=0" not in result.stderr


def test_what_does_badly_on_models_with_normalised_keys_is_told_of_those():
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    assert "a rotation" in known_cautions(["turboquant:bits=3"], model)[0]
    assert known_cautions(["trellis:bits=3", "int:bits=8"], model) == []


def test_a_report_says_what_was_measured_and_on_what(model_folder, tmp_path):
    file = tmp_path / "row.json"
    sizes = ("--tokens", 100, "--chunk", 40, "--threads", 1, "--model", model_folder)
    document = json.loads(
        good("eval", "int:bits=4", "int:bits=4,window=0", *sizes, "--report", file, "--json")
    )
    packed, bare = json.loads(file.read_text("utf-8"))
    measured = document["rows"][1]
    for name in ("spec", "kl_mean", "kl_se", "top1", "share"):
        assert packed[name] == measured[name], name
    assert packed["model"] == Path(model_folder).name and packed["dtype"] == "float32"
    assert packed["protocol"] == {
        "text": "northanger_abbey.txt", "tokens": 100, "chunk": 40, "scored": 59,
        "read": "as decoding reads",
    }  # fmt: skip
    assert set(packed["versions"]) == {"kvpact", "torch", "transformers", "python"}
    assert packed["threads"] == 1 and packed["processor"].split()[0] == platform.machine()
    assert bare["protocol"]["read"] == "as decoding reads"
    file.write_text("[1]", encoding="utf-8")
    assert "is no report of kvpact eval" in bad("eval", "int:bits=4", *sizes, "--report", file)
    assert "--report can't go with --budget" in bad("eval", "--budget", "1MB", "--report", file)
