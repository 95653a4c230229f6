"""`kvpact eval --budget` on a tiny saved model: what a budget costs over the length."""

import json

import torch
from commands import bad, good
from PIL import Image
from tests.helpers.tiny_llama import tiny_llama
from transformers import DynamicCache

from kvpact.data import book_path
from kvpact.evaluate.recent import recent_cache
from kvpact.integrations.transformers.versions import named

BUDGETS = "450kB,140kB"


def test_growth_has_tables_numbers_and_a_plot(model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(book_path().read_text("utf-8")[:5000], encoding="utf-8")
    out = good(
        "eval", "--budget", BUDGETS, "--text", text, "--tokens", 512, "--chunk", 64,
        "--model", model_folder, "--out", tmp_path / "out", "--threads", 1, "--task-samples", 1,
        "--verbose",
    )  # fmt: skip
    (data,) = json.loads((tmp_path / "out" / "growth.json").read_text("utf-8"))
    rows = {row["name"]: row for row in data["rows"]}
    assert {"budget=450kB", "budget=140kB", "trellis:bits=2"} <= rows.keys()
    assert all(name in out for name in rows)
    last = [name for name in rows if name.startswith("exact, last")]
    assert len(last) == 2
    ends = [point["tokens"] for point in rows["trellis:bits=2"]["points"]]
    assert ends == [256, 512] and len(rows["trellis:bits=2"]["kl"]) == 7
    for name in ("budget=450kB", last[0]):
        assert all(0 < point["bytes"] <= 450_000 for point in rows[name]["points"])
    large, small = rows["budget=450kB"]["points"], rows["budget=140kB"]["points"]
    assert large[0]["kl"] < large[1]["kl"] and large[0]["bits"] > large[1]["bits"] > 2
    assert small[1]["kl"] is None and small[1]["needle"] is None  # it does not fit any more
    assert large[1]["needle"] is not None and large[1]["needle_se"] > 0
    with Image.open(tmp_path / "out" / "growth.png") as image:
        image.load()
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_what_can_t_go_with_a_budget(model_folder):
    assert "--tasks can't go with --budget" in bad("eval", "--budget", "1MB", "--tasks", "all")
    assert "give a SPEC, or --budget" in bad("eval")
    args = ("--model", model_folder, "--tokens", 600)
    assert "'much' is no number of bytes" in bad("eval", "--budget", "much", *args)
    chunks = ("--budget", "1MB", "--chunk", 256)
    assert "600 tokens in chunks of 256 show no growth" in bad("eval", *chunks, *args)
    assert "has no room for 64 tokens" in bad("eval", "--budget", "9kB", *args)


@torch.no_grad()
def test_an_exact_window_holds_the_first_and_the_last_tokens():
    model = tiny_llama(256)
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(3))
    cache, exact = recent_cache(model.config, 20), DynamicCache(config=model.config)
    for part in ids.split(10, dim=1):
        found = model(input_ids=part, **named(cache)).logits
        wanted = model(input_ids=part, **named(exact)).logits
        assert torch.equal(found, wanted) == (exact.get_seq_length() <= 30)
    assert cache.get_seq_length() == 60
    keys, whole = cache.layers[0].keys, exact.layers[0].keys
    assert torch.equal(keys, torch.cat([whole[:, :, :4], whole[:, :, -16:]], 2))
