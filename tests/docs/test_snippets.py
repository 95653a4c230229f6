"""Every Python block of the README and the site runs; command lines name what `kvpact` has."""

import re
import shlex
import warnings
from functools import cache

import pytest
import torch
import typer
from doc_snippets import PAGES, ROOT, blocks, given, name_of
from lm_eval_stub import stand_in

from kvpact import registry
from kvpact.cli.app import app
from kvpact.integrations.transformers.versions import CACHE
from kvpact.registry import known_names

RUN = {page: [b for b in blocks(page) if b.language == "python"] for page in PAGES}
NEEDS = ("gpu", "vllm", "server")
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHELL = ("", "console", "bash", "sh")


@pytest.mark.parametrize("page", [p for p in PAGES if RUN[p]], ids=name_of)
def test_the_blocks_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, record_property):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVPACT_CACHE", str(tmp_path / "kvpact"))
    stand_in(monkeypatch)
    torch.manual_seed(0)
    names, before = given(tmp_path), set(known_names())
    given_model = names["name"]
    run = [block for block in RUN[page] if not block.needs]
    try:
        with warnings.catch_warnings(action="ignore"):
            for block in run:
                # Tracebacks name the page and its line. There is no hub here.
                code = "\n" * block.line + block.code.replace(HUB, given_model)
                exec(compile(code, str(page), "exec", dont_inherit=True), names)
    finally:
        for name in set(known_names()) - before:
            registry._registered.pop(name)
    record_property("snippets_run", len(run))
    print(f"{name_of(page)}: {len(run)} of {len(RUN[page])} Python blocks were run")


README = ROOT / "README.md"
FIRST, ENGINE = (block.code for block in RUN[README])


@pytest.mark.parametrize("code", [FIRST, ENGINE], ids=("first", "engine"))
def test_programs_of_the_readme_run_as_pasted(code, tmp_path, monkeypatch, capsys):
    given_model = given(tmp_path)["name"]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = code.replace("smollm2", given_model)
    code = code.replace("cache=cache,", f"{CACHE}=cache,")  # as its comment says
    code = code.replace("cache=exact,", f"{CACHE}=exact,")
    with warnings.catch_warnings(action="error", category=FutureWarning):
        exec(compile(code, "README.md", "exec", dont_inherit=True), {})
    said = capsys.readouterr().out.splitlines()[-1]
    if code is ENGINE:
        assert float(said) == 6.72  # as the block says
    else:
        form = r"<CompressedCache trellis:bits=4 \| (\S+) tokens \| (\S+) MB \| (\d+) % of an .*>"
        shown = re.fullmatch(form, said)
        assert shown and int(shown[1].replace(",", "")) > 2000 and 0 < int(shown[3]) < 40


def test_only_few_blocks_are_left_out_and_say_why():
    left = [(name_of(page), block.needs) for page in PAGES for block in RUN[page] if block.needs]
    assert {needs for _, needs in left} <= set(NEEDS)
    total = sum(map(len, RUN.values()))
    print(f"{total - len(left)} of {total} Python blocks are run; left out: {left}")
    assert total >= 40 and len(left) <= 5


def _command_lines(text: str) -> list[list[str]]:
    """Return the words of each ``kvpact …`` line of a block, continued lines joined."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(r"(\$ )?([A-Z_]+=\S+ )*kvpact ", line.strip()):
            continue
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["kvpact"] and not any("$" in word for word in words):
            found.append(words[1:])
    return found


@cache
def _root():
    return typer.main.get_command(app)


@pytest.mark.parametrize("words", [
    pytest.param(words, id=f"{name_of(page)}: {' '.join(words)[:60]}")
    for page in PAGES for block in blocks(page) if block.language in SHELL
    for words in _command_lines(block.code)
])  # fmt: skip
def test_a_command_line_is_one_that_kvpact_has(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in words:  # some options want their file to be there
        if re.fullmatch(r"[\w/-]+\.[a-z]+", word):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    command, path = _root(), ["kvpact"]
    while words and words[0] in getattr(command, "commands", {}):
        command, path, words = command.commands[words[0]], [*path, words[0]], words[1:]
    assert not getattr(command, "commands", {}) or not words or words[0].startswith("-"), path
    # Reads the words as the command line does, and runs nothing.
    command.make_context(" ".join(path), list(words), resilient_parsing=False)
