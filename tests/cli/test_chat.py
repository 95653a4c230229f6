"""`kvpact chat` on a tiny model: what is said goes on from the tokens that the cache holds."""

import json
import shutil

import pytest
import torch
from commands import bad, invoke
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def folder(model_folder, tmp_path):
    path = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def continued(folder, text, answers=()):
    """Return what the exact cache says after a text, in whose gaps earlier answers stand."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    parts = [torch.tensor(tokenizer(part)["input_ids"]) for part in text.split("|")]
    ids = torch.cat([x for pair in zip(parts, [*answers, parts[0][:0]], strict=True) for x in pair])
    model = LlamaForCausalLM.from_pretrained(folder)
    return model.generate(ids[None], max_new_tokens=6, do_sample=False)[0, len(ids) :]


def test_turns_go_on_from_what_the_cache_holds(folder):
    args = ("chat", folder, "--spec", "none", "--max-new-tokens", 6)
    said = "one\n\n two \n/exit\nthree\n"
    result = invoke(*args, "--json", input=said)
    first, second = json.loads(result.stdout)["turns"]
    answer = continued(folder, "u:one;a:")
    after = continued(folder, "u:one;a:|;u:two;a:", [answer])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert first["text"] == tokenizer.decode(answer) and second["text"] == tokenizer.decode(after)
    assert (first["tokens"], second["tokens"]) == (8 + 6, 8 + 6 + 9 + 6)
    assert second["exact_bytes"] == 2 * (second["tokens"] - 1) * 2 * 32 * 2 * 4  # fp32, fed tokens
    streamed = invoke(*args, input=said)
    assert streamed.stdout == f"{first['text']}\n{second['text']}\n"
    (line, _) = (x for x in streamed.stderr.splitlines() if x.startswith("["))
    assert line.startswith("[14 tokens, cut by --max-new-tokens: ") and "in float32" in line


def test_the_end_of_an_answer_is_the_templates(folder):
    GenerationConfig(eos_token_id=int(continued(folder, "u:one;a:")[0])).save_pretrained(folder)
    result = invoke("chat", folder, "--json", input="one\ntwo\n")
    assert json.loads(result.stdout)["turns"][0]["tokens"] == 8
    assert "[8 tokens: " in result.stderr


def test_what_can_not_chat_is_told(folder, model_folder):
    result = invoke("chat", model_folder, input="one\n")
    assert result.exit_code == 2 and "`kvpact generate` without --chat" in result.stderr
    result = invoke("chat", folder, "--max-new-tokens", 2000, input="one\n")
    assert result.exit_code == 2 and "1024 positions; start a new chat" in result.stderr
    assert "owner/name" in bad("chat", "smolm2")
