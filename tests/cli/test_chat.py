"""`kvpact chat` on a tiny model: what is said goes on from the tokens that the cache holds."""

import json
import shutil

import pytest
from commands import good, invoke
from transformers import GenerationConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ARGS = ("--spec", "none", "--max-new-tokens", 6)


@pytest.fixture
def folder(model_folder, tmp_path):
    path = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def continued(folder, text):
    return json.loads(good("generate", text, "--model", folder, *ARGS, "--json"))["text"]


def test_turns_go_on_from_what_the_cache_holds(folder):
    said = "one\n\n/help\n two \n/bye\nthree\n"
    result = invoke("chat", folder, *ARGS, "--json", input=said)
    first, second = json.loads(result.stdout)["turns"]
    assert first["text"] == continued(folder, "u:one;a:")
    assert second["text"] == continued(folder, f"u:one;a:{first['text']};u:two;a:")
    assert (first["tokens"], second["tokens"]) == (8 + 6, 8 + 6 + 9 + 6)
    assert second["exact_bytes"] == 2 * (second["tokens"] - 1) * 2 * 32 * 2 * 4  # fp32, fed tokens
    streamed = invoke("chat", folder, *ARGS, input=said)
    assert streamed.stdout == f"{first['text']}\n{second['text']}\n"
    assert "/help is not known, and was not said; /exit or Ctrl-D ends" in streamed.stderr
    (line, _) = (x for x in streamed.stderr.splitlines() if x.startswith("["))
    assert line.startswith("[14 tokens, cut by --max-new-tokens: ") and "in float32" in line


def test_the_end_of_an_answer_is_the_templates(folder):
    first = PreTrainedTokenizerFast.from_pretrained(folder)(continued(folder, "u:one;a:"))
    GenerationConfig(eos_token_id=first["input_ids"][0]).save_pretrained(folder)
    result = invoke("chat", folder, *ARGS, "--json", input="one\n")
    assert json.loads(result.stdout)["turns"][0]["tokens"] == 8 and "[8 tokens: " in result.stderr


def test_what_can_not_chat_is_told(folder, model_folder):
    assert "without --chat" in invoke("chat", model_folder, input="one\n").stderr
    result = invoke("chat", folder, "--max-new-tokens", 2000, input="one\n")
    assert result.exit_code == 2 and "1024 positions; start a new chat" in result.stderr
