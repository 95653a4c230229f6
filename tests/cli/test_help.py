"""What a person meets first: help with examples, the version, completion, and no wait for torch."""

import ast
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import bad, good, invoke
from typer.testing import CliRunner

import kvpact.cli
from kvpact.cli.app import Deferred, app
from kvpact.cli.commands import COMMANDS, ELSEWHERE
from kvpact.cli.inputs import prompt_text
from kvpact.cli.options import complete_spec

GROUPS = [name for name, entry in COMMANDS.items() if not entry.target]
SINGLE = [name for name, entry in COMMANDS.items() if entry.target]


@pytest.mark.parametrize("name", SINGLE)
def test_every_command_shows_examples_that_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = COMMANDS[name].examples
    shown = good(*name.split(), "--help")
    assert examples and all(f"\n    {line}\n" in shown for line in examples)
    for line in examples:
        program, *words = shlex.split(line)
        assert program == "kvpact" and len(line) <= 76, "is cut at 80 columns"
        command, parent = typer.main.get_command(app), None
        while hasattr(command, "commands"):
            context = command.make_context(words[0], words[:1], resilient_parsing=True)
            parent, command, words = context, command.commands[words[0]], words[1:]
        for word in words:
            if word.endswith((".txt", ".kv")):
                Path(word).touch()
        command.make_context(name, list(words), parent=parent)  # raises where it does not parse


@pytest.mark.parametrize("name", ["", *GROUPS, "size", "llama-cpp check", "store ls"])
def test_h_is_help(name):
    assert good(*name.split(), "-h") == good(*name.split(), "--help") != ""


@pytest.mark.parametrize(("typed", "told"), [
    ("size smollm2 --context 32k", "write: kvpact size … --tokens VALUE"),
    ("size smollm2 --kv-cache-dtype fp8", "write: kvpact size … SPEC"),
    ("size --model smollm2", "write: kvpact size … MODEL"),
    ("recommend smollm2 --memory 8GB", "write: kvpact recommend … --budget VALUE"),
    ("eval --dataset wikitext", "write: kvpact eval … --text VALUE"),
    ("size qwen3-8b gpt-oss-20b", "'gpt-oss-20b' is a model and no spec; write: kvpact size gpt"),
    ("eval --specs none", "write: kvpact eval … SPEC"),
    ("generate x --stop .", "No such option: --stop; kvpact generate has --budget, --calib"),
    ("snapshot load x", "No such command 'load'; kvpact snapshot has restore, save, show"),
    ("llama-cpp --model m.gguf", 'write: eval "$(kvpact llama-cpp)", then the program'),
    ("llama-cpp llama-server", 'write: eval "$(kvpact llama-cpp)", then the program'),
    ("eval smollm2", "'smollm2' is a model and no spec; write: trellis:bits=4 --model smollm2"),
    ("generate x -m smollm2", "write: kvpact generate … --model VALUE"),
    ("generate x -ctk q8_0", "-ctk; write: kvpact generate … --spec VALUE"),
    ("generate x -ngl 99", "-ngl; leave it out: commands run on the CPU"),
    ("generate x -c 4096", "leave it out: the cache grows as needed"),
    ("generate x --max_new_tokens 8", "write: kvpact generate … --max-new-tokens VALUE"),
    ("eval none --limit 10", "write: kvpact eval … --task-samples VALUE"),
    ("eval none --output_path x", "write: kvpact eval … --out VALUE"),
    ("eval none --tasks hellaswag", "lm_eval's stand in docs/guides/lm-eval.md"),
    ("chat smollm2 --system pirate", "leave it out: begin your first line with it"),
    ("store ls", "write: kvpact store ls [OPTIONS] STORE"),
    ("doctor smollm2", "write: kvpact doctor [OPTIONS]"),
    ("trellis:bits=4", "a command stands first"),
    ("generate smollm2 hello", "a text stands in quotes, all else by name: --model and --spec"),
])  # fmt: skip
def test_what_other_tools_call_an_option_is_told(typed, told):
    assert told in bad(*typed.split())


def test_a_dash_is_the_text_that_is_piped(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert prompt_text(None, "-", "continue") == "Once"


@pytest.mark.parametrize("word", ELSEWHERE)
def test_words_of_other_tools_name_the_command(word):
    told = bad(word)
    named = re.findall(r"kvpact ([a-z-]+)", told.partition("; see ")[0])
    assert repr(word) in told and named and {*named} <= {*COMMANDS} and word not in COMMANDS


@pytest.mark.parametrize("name", SINGLE)
def test_the_list_says_what_the_docstring_says(name):
    """Read without importing: the list is there before a command's module is."""
    module, _, function = COMMANDS[name].target.partition(":")
    source = Path(kvpact.cli.__file__).with_name(f"{module}.py").read_text("utf-8")
    defined = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (found,) = (node for node in defined if node.name == function)
    assert ast.get_docstring(found).partition("\n")[0] == COMMANDS[name].summary


def test_no_arguments_show_the_help():
    for group in ("", *GROUPS):
        words = group.split()
        result = invoke(*words)
        assert result.exit_code == 0 and result.stdout == good(*words, "--help")
        for name in COMMANDS:
            if name.rpartition(" ")[0] == group:
                assert f"\n  {name.split()[-1]} " in result.stdout


def test_the_version_is_the_packages():
    assert good("--version") == f"kvpact {kvpact.__version__}\n"


def test_help_does_not_wait_for_torch():
    """Neither the list of commands nor, but for two, a command's own help."""
    lines = [["--help"], ["--version"], *([*x.split(), "--help"] for x in SINGLE)]
    code = (
        "import sys; from kvpact.cli import main\n"
        f"for line in {[x for x in lines if x[0] not in ('doctor', 'demo')]!r}:\n"
        "    sys.argv = ['kvpact', *line]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 0, line\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), line\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_is_imported_when_it_is_called(monkeypatch):
    monkeypatch.setattr(Deferred, "load", lambda self: pytest.fail("loaded"))
    good("--help")
    with pytest.raises(pytest.fail.Exception):
        invoke("size", "--help")


# --- completion ------------------------------------------------------------------------------


def completed(line):
    """What bash is told to offer behind a line."""
    words = line.split(" ")
    env = {
        "_KVPACT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    return CliRunner().invoke(app, [], prog_name="kvpact", env=env).stdout.split()


def test_commands_complete_without_being_imported(monkeypatch):
    monkeypatch.setattr(Deferred, "load", lambda self: pytest.fail("loaded"))
    assert completed("kvpact s") == ["size", "snapshot", "store"]
    assert completed("kvpact snapshot re") == ["restore"]


def test_specs_models_and_dtypes_complete_by_name():
    assert completed("kvpact eval turboquant_") == complete_spec("turboquant_") != []
    assert completed("kvpact methods tre") == ["trellis"]
    assert completed("kvpact generate --spec kv") == ["kvarn"]
    assert completed("kvpact size sm") == ["smollm2", "smollm3-3b"]
    assert completed("kvpact size smollm2 --dtype b") == ["bfloat16"]
    assert completed("kvpact demo --model g") == ["gemma3"]
    assert "--json" in completed("kvpact doctor --")


def test_the_script_of_a_shell_is_shown(monkeypatch):
    # The shell is an argument then, and not the one that runs the tests.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="kvpact")
    assert result.exit_code == 0 and "_KVPACT_COMPLETE=complete_bash" in result.stdout
