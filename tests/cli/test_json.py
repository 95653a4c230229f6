"""``--json``: every command prints one JSON document on stdout, of these keys and types of values.

``[x]`` is a list of x, ``{"*": x}`` a mapping of text to x, a tuple several types.
"""

import json

import pytest
from commands import invoke, passed
from fake_llama import write

from kvpact.cli.commands import COMMANDS

NONE = type(None)
ANY = object()
FLOAT = (float, NONE)  # null stands for NaN
SHAPE = {
    "count": int, "kind": str, "compressed": bool, "heads": int, "key_dim": int, "value_dim": int,
    "latent": bool, "limit": (int, NONE), "state_bytes": int, "index_width": int, "rate": int,
    "window_width": int, "buffer_width": int,
    "k_eq_v": bool, "made": bool, "sliding": (str, NONE),
}  # fmt: skip
BITS = [{"width": int, "k": float, "v": float}]
ROW = {
    "spec": str, "packed_only": bool, "tokens": int, "chunk": int, "model": str, "text": str,
    "kl_mean": FLOAT, "perplexity": float, "bits_per_value": FLOAT, "bytes": int, "...": ANY,
}  # fmt: skip
REPORT = {
    "rows": [ROW], "summary": [ANY], "free_running": [ANY], "tasks": [ANY], "files": [str],
    "growth": [{"model": str, "rows": [{"name": str, "points": [ANY], "kl": [float]}], "...": ANY}],
}  # fmt: skip
DOCUMENTS = {
    "size": {
        "model": (str, NONE), "positions": (int, NONE), "dtype": str, "batch": int,
        "layers": [SHAPE], "unplanned": [str],
        "rows": [{
            "spec": str, "tokens": int, "slots": int, "factors": int, "sinks": int, "window": int,
            "unused": int, "compressed": int, "own": int, "total": int, "exact": int,
            "bits_per_value": FLOAT,
        }],
        "schedule": ({"budget": int, "max_tokens": int, "layers": [ANY],
                      "rows": [{"tokens": int, "bits": float, "bytes": int}]}, NONE),
    },
    "eval": REPORT,
    "demo": {
        "continuations": [
            {"cache": str, "text": str, "bytes": int, "process_bytes": (int, NONE)}
        ],
    },
    "recommend": {
        "chosen": (str, dict), "bytes": int, "verdict": str, "budget": int, "kl_mean": float,
        "measured": [{"spec": str, "bytes": int, "predicted": float, "...": ANY}],
        "verified": [ANY], "tools": (str, dict), "files": [str], "...": ANY,
    },
    "recipes": {
        "recipes": [{"name": str, "default": str, "layers": {"*": str}, "measured": dict,
                     "...": ANY}],
    },
    "calibrate": {
        "file": str, "bytes": int, "layers": int, "tokens": int, "k": [str], "v": [str],
    },
    "generate": {
        "spec": str, "text": str, "prompt_tokens": int, "new_tokens": int,
        "bytes": dict.fromkeys(("codes", "side", "sinks", "window", "unused", "own", "total"), int),
        "exact_bytes": {"*": int}, "bits_per_value": FLOAT, "slot_bits_per_value": FLOAT,
        "layers": {"compressed": int, "native": int},
        "seconds": {"first_token": float, "prefill": float, "decode": float},
        "prefix": ({"loaded_tokens": int, "saved_tokens": int}, NONE), "budget": (dict, NONE),
    },
    "chat": {
        "spec": str,
        "turns": [{"prompt": str, "text": str, "tokens": int, "bytes": int, "exact_bytes": int}],
    },
    "methods": {
        "methods": [{"name": str, "summary": str, "options": dict, "paper": (str, NONE),
                     "slot_bits": BITS}],
        "aliases": [{"name": str, "spec": str}], "broken": [{"name": str, "error": str}],
    },
    "methods NAME": {
        "spec": str, "alias_of": (str, NONE), "cautions": [str], "slot_bits": BITS,
        "methods": [{"side": str, "name": str, "summary": str, "use": str, "avoid": [str],
                     "text": str, "options": [
            {"name": str, "type": str, "default": ANY, "value": ANY, "meaning": str}]}],
    },
    "doctor": {
        "system": {"*": str},
        "devices": [{
            "name": str,
            "backends": [{"operation": str, "backend": str, "available": bool, "reason": str}],
            "methods": [{"name": str, "backends": {"*": str}, "reasons": [str]}],
        }],
        "packages": [{"extra": str, "package": str, "version": (str, NONE), "install": str}],
        "models": ({"folder": str, "converted": [str]}, NONE),
    },
    "llama-cpp": {"environment": {"*": str}},
    "llama-cpp check": {
        "library": str, "programs": {"*": str}, "depth": int, "threads": int,
        "operations": ({"passed": int, "failed": int, "left": int}, NONE),
        "times": [{"cache": str, "ms": float, "kvpact_ms": float, "attentions": int,
                   "used": bool}],
    },
    "snapshot save": {"file": str, "tokens": int, "bytes": int, "exact_bytes_fp16": int},
    "snapshot show": {"identity": dict, "layers": [ANY], "...": ANY},
    "snapshot verify": {"good": [{"file": str, "tokens": int, "bytes": int}]},
    "snapshot restore": {"file": str, "text": str, "restored_tokens": int, "new_tokens": int},
    "store ls": {"store": str, "keys": [str]},
    "store stats": {"store": str, "entries": int, "bytes": int},
    "store gc": {
        "store": str, "freed_bytes": int,
        "removed": {name: int for name in ("expired", "evicted", "damaged", "leftovers")},
    },
}  # fmt: skip


def unlike(value, schema, where):
    """Return the first place where a value is not as its schema says, None where it is."""
    if schema is ANY:
        return None
    if isinstance(schema, tuple):
        return where if all(unlike(value, one, where) for one in schema) else None
    if isinstance(schema, list):
        if not isinstance(value, list):
            return where
        found = (unlike(x, schema[0], f"{where}[{i}]") for i, x in enumerate(value))
        return next(filter(None, found), None)
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return where
        named = {name: x for name, x in schema.items() if name not in ("*", "...")}
        if missing := {*named} - {*value}:
            return f"{where}: lacks {missing}"
        if more := {*value} - {*named} and not {"*", "..."} & {*schema}:
            return f"{where}: more keys, {more}"
        inside = {name: named.get(name, schema.get("*", ANY)) for name in value}
        found = (unlike(value[name], one, f"{where}.{name}") for name, one in inside.items())
        return next(filter(None, found), None)
    if isinstance(value, bool) and schema is not bool:
        return where
    good = isinstance(value, (int, float) if schema is float else schema)
    return None if good else f"{where}: {value!r}"


def document(name, *args):
    """Return what a command prints with ``--json``, checked."""
    words = name.removesuffix(" NAME")
    result = passed(*words.split(), *args, "--json")
    found = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))
    assert found.pop("command") == words
    assert unlike(found, DOCUMENTS[name], name) is None
    return found


def test_every_command_has_a_document():
    commands = {name for name, entry in COMMANDS.items() if entry.target}
    assert commands == {*DOCUMENTS} - {"methods NAME"}


def test_size(model_folder):
    found = document("size", model_folder, "none", "lowrank:energy=0.9", "--batch", 2)
    assert [row["tokens"] for row in found["rows"]] == [4096, 32768, 131072] * 2
    assert found["model"] == model_folder and found["batch"] == 2 and len(found["unplanned"]) == 1
    found = document("size", "none", "--layers", 1, "--kv-heads", 1, "--head-dim", 8,
                     "--tokens", 32)  # fmt: skip
    names = json.loads(passed("size", "--list", "--json").stdout)["models"]
    assert {"name": "qwen3-8b", "hub": "Qwen/Qwen3-8B"} in names and len(names) > 40
    assert found["model"] is None and found["rows"][0]["bits_per_value"] == 16


def test_methods_and_doctor():
    assert {x["name"] for x in document("methods")["methods"]} >= {"int", "turboquant", "none"}
    found = document("methods NAME", "q8_0")
    assert found["alias_of"].startswith("int:bits=8") and found["methods"][0]["side"] == "both"
    found = document("methods NAME", "int:bits=8/fp8")
    assert [x["side"] for x in found["methods"]] == ["k", "v"]
    names = [x["name"] for x in document("recipes")["recipes"]]
    assert document("recipes", names[0])["recipes"][0]["name"] == names[0]
    found = document("doctor")
    assert found["system"]["python"] and found["devices"][0]["name"] == "cpu"


def test_llama_cpp(tmp_path, monkeypatch):
    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(model))
    assert document("llama-cpp")["environment"]["GGML_BACKEND_PATH"] == str(model)
    found = document("llama-cpp check", write(tmp_path / "bin"), "--model", model)
    assert len(found["times"]) == 1 and found["operations"]["passed"] == 2
    bare = write(tmp_path / "bare", ["llama-server"])
    assert document("llama-cpp check", bare)["operations"] is None


def test_eval_recommend_and_demo(model_folder, book_text, tmp_path):
    args = ("--model", model_folder, "--text", book_text, "--tokens", 300, "--chunk", 64)
    found = document("eval", "int:bits=4", *args, "--ablation", "--free-running", 4)
    assert found["rows"][0]["spec"] == "none" and len(found["rows"]) == 4
    assert found["rows"][1]["kl_mean"] > 0 and len(found["free_running"]) == 1
    assert found["files"] == found["summary"] == found["tasks"] == []
    found = document("recommend", model_folder, *args[2:6], "--context", 4096, "--out", tmp_path)
    assert found["files"][1] == str(tmp_path / "recommend.json")
    written = json.loads((tmp_path / "recommend.json").read_text("utf-8"))
    assert {**written, "files": found["files"]} == found
    found = document("demo", "--model", model_folder, "--tokens", 600, "--new-tokens", 4)
    caches = [x["cache"] for x in found["continuations"]]
    assert caches == ["none", "trellis:bits=4", "trellis:bits=2"]


def test_generate_snapshots_and_stores(model_folder, book_text, tmp_path):
    assert document("chat", model_folder)["turns"] == []
    model = ("--model", model_folder)
    args = ("--file", book_text, *model, "--max-new-tokens", 4)
    assert document("generate", *args)["prefix"] is None
    args += ("--spec", "turboquant:bits=4")
    found = document("generate", *args, "--prefix-store", tmp_path / "store")
    assert found["prefix"] == {"loaded_tokens": 0, "saved_tokens": 640}
    assert found["text"] == passed("generate", *args).stdout[: len(found["text"])] != ""
    keys = document("store ls", tmp_path / "store")["keys"]
    assert len(keys) == document("store stats", tmp_path / "store")["entries"] == 10
    assert document("store gc", tmp_path / "store", "--max-bytes", 1)["removed"]["evicted"] == 10
    path = tmp_path / "a.kv"
    saved = document("snapshot save", "Once upon a time", "--out", path, *model)
    assert saved["bytes"] == path.stat().st_size and saved["tokens"] == 16
    good = {"file": str(path), "tokens": 16, "bytes": saved["bytes"]}
    assert document("snapshot verify", path, path)["good"] == [good] * 2
    assert len(document("snapshot show", path)["layers"]) == 2
    found = document("snapshot restore", path, *model, "--max-new-tokens", 4)
    assert (found["restored_tokens"], found["new_tokens"]) == (16, 4)


def test_calibrate(model_folder, book_text, tmp_path):
    path, text = tmp_path / "a.calibration", ("--text", book_text, "--tokens", 600)
    found = document("calibrate", model_folder, *text, "--spec", "pca", "--out", path)
    assert found["bytes"] == path.stat().st_size
    assert found["k"] == found["v"] == ["pca/1"]


def test_an_error_leaves_stdout_empty(tmp_path):
    for args in (("size", "none"), ("store", "ls", tmp_path), ("eval", "bogus")):
        result = invoke(*args, "--json")
        assert (result.exit_code, result.stdout) == (2, "") and result.stderr.startswith("error:")


def test_no_document_holds_what_json_has_not():
    from kvpact.files import json_ready

    found = json_ready({"a": [float("nan"), (float("inf"), 1)], "b": 2.5})
    assert found == {"a": [None, [None, 1]], "b": 2.5}
