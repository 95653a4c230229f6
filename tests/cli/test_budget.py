"""`--budget` of `kvpact size`, `generate` and `snapshot`."""

import json

from commands import bad, good

from kvpact.cli.inputs import candidate_of

BUDGET = "350kB"


def schedule(*args):
    return json.loads(good("size", *args, "--json"))["schedule"]


def test_size_shows_how_bits_fall():
    numbers = ("--layers", 4, "--kv-heads", 3, "--head-dim", 64)
    told = schedule(*numbers, "--budget", "4MB")
    assert told["budget"] == 4_000_000 and len(told["layers"]) == 4
    bits = [row["bits"] for row in told["rows"]]
    assert bits == sorted(bits, reverse=True) and bits[0] == 16 and bits[-1] < 2.5
    assert told["rows"][-1]["tokens"] == told["max_tokens"]
    assert all(0.5 * told["budget"] < row["bytes"] <= told["budget"] for row in told["rows"])
    out = good("size", *numbers, "--budget", "4MB")
    assert f"{told['max_tokens']:,} tokens fit" in out and "Budget: 4.00 MB" in out
    share = schedule(*numbers, "--budget", "25%", "--tokens", 4096)
    assert share["budget"] == 4096 * 4 * 3 * 128 * 2 // 4
    assert json.loads(good("size", "none", *numbers, "--json"))["schedule"] is None
    assert "one SPEC to begin with" in bad("size", "none", "fp8", *numbers, "--budget", "1MB")
    assert "has no room for 64 tokens" in bad("size", *numbers, "--budget", "100kB")


def test_windows_of_a_known_model_are_set_aside():
    message = bad("size", "gemma3", "--budget", "5MB")
    assert "a budget of 5.00 MB has no room for 64 tokens" in message
    assert schedule("gemma3", "--budget", "16MB")["max_tokens"] > 10_000


def test_generate_and_snapshots_stay_within_a_budget(model_folder, book_text, tmp_path):
    args = ("--file", book_text, "--model", model_folder, "--budget", BUDGET)
    found = json.loads(good("generate", *args, "--max-new-tokens", 8, "--json"))
    assert found["spec"] == f"budget={BUDGET}" and found["bytes"]["total"] <= 350_000
    assert found["budget"]["bytes"] == 350_000 and 2 < found["budget"]["bits"] < 5
    assert "mean bits within the budget" in good("generate", *args, "--max-new-tokens", 2)
    file = tmp_path / "text.kv"
    good("snapshot", "save", "--out", file, *args)
    more = ("--model", model_folder, "--max-new-tokens", 8, "--json")
    gone_on = json.loads(good("snapshot", "restore", file, "--budget", BUDGET, *more))
    assert gone_on["restored_tokens"] >= 699 and len(gone_on["text"]) > 0
    assert "made with" in bad("snapshot", "restore", file, "--budget", "300kB", *more[:2])
    assert "--prefix-store can't go with --budget" in bad("generate", *args, "--prefix-store", "x")
    assert "no number of bytes" in bad("generate", "a", "--budget", "much")
    assert "add context=" in bad("generate", "a", "--budget", "25%", "--model", model_folder)


def test_a_named_default_is_what_a_budget_begins_with():
    labels = [candidate_of(spec, budget="1MB").label for spec in (None, "trellis:bits=4")]
    assert labels == ["budget=1MB", "trellis:bits=4 budget=1MB"]
    assert candidate_of(None).label == "trellis:bits=4"
