"""``kvpact calibrate``, and the commands that take its file, on a tiny saved model."""

import pytest
from commands import bad, passed

from kvpact import Calibration, Snapshot
from kvpact.data import book_path
from kvpact.integrations.transformers.attention.learnt import text_rows

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, and so on."


@pytest.fixture(scope="module")
def calibrated(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    book = book_path().read_text("utf-8")
    for name, begin in (("a.txt", 0), ("b.txt", 5000)):
        (folder / name).write_text(book[begin : begin + 400], encoding="utf-8")
    path = folder / "tiny.calibration"
    texts = ("--text", folder / "a.txt", "--text", folder / "b.txt")
    result = passed("calibrate", model_folder, "--out", path, *texts, "--tokens", 600)
    assert "pca/1" in result.stdout and "trellis/1" in result.stdout
    return path


def test_a_file_is_written(calibrated):
    held = Calibration.load(calibrated)
    assert held.tokens == 600 and held.model
    assert all(sorted(layer.v) == ["pca/1"] for layer in held.layers.values())


def test_every_piece_of_a_text_begins_as_texts_do():
    class Words:
        def __init__(self, front):
            self.front = front

        def __call__(self, text, max_length=None, **_):
            ids = [*self.front, *map(int, text.split())][:max_length]
            return {"input_ids": ids if text else [*ids, 2]}

    texts = [("a", " ".join(map(str, range(10, 4510)))), ("b", " ".join(map(str, range(9000))))]
    rows = text_rows(Words([7]), texts, 8192)
    assert [len(row) for row in rows] == [2048] * 4
    assert all(row[0] == 7 for row in rows)
    assert rows[0][1] == 10 and rows[1][1] == 10 + 2047 and rows[3][1] == 2047
    two = text_rows(Words([7, 8]), texts, 8192)
    assert all(row[:2].tolist() == [7, 8] for row in two) and two[1][2] == 10 + 2046
    bare = text_rows(Words([]), texts, 8192)
    assert [int(row[0]) for row in bare] == [10, 10 + 2048, 0, 2048]


def test_eval_takes_it(calibrated, model_folder):
    options = ("--model", model_folder, "--tokens", 300, "--chunk", 64)
    specs = ("pca:bits=6", "pca:bits=1")
    result = passed("eval", *specs, *options, "--calibration", calibrated)
    assert all(spec in result.stdout for spec in specs)
    assert "another model" not in result.stderr
    error = bad("eval", *specs, *options, "--model", "smollm2", "--calibration", calibrated)
    assert "one model" in error
    assert "kvpact calibrate" in bad("eval", "vq", *options, "--calibration", calibrated)


def test_prefixes_and_snapshots_are_stored_by_it(calibrated, model_folder, tmp_path):
    options = ("--model", model_folder, "--spec", "trellis:bits=4", "--calibration", calibrated)
    more = ("--max-new-tokens", 4, "--prefix-store", tmp_path / "store", "--storage", "pca:bits=2")
    first = passed("generate", TEXT * 2, *options, *more)
    second = passed("generate", TEXT * 2, *options, *more)
    assert "tokens saved to the store" in first.stdout + first.stderr
    assert "prompt tokens from the store" in second.stdout + second.stderr
    assert "--prefix-store" in bad("generate", TEXT, *options, "--storage", "pca")
    path = tmp_path / "a.safetensors"
    passed("snapshot", "save", TEXT, "--out", path, *options, "--storage", "pca:bits=2")
    specs = {layer.spec["key"]["method"] for layer in Snapshot.load(path).manifest.layers}
    assert specs == {"pca"}
    new = ("--model", model_folder, "--max-new-tokens", 4)
    passed("snapshot", "restore", path, *new)
    passed("snapshot", "restore", path, *new, "--spec", "turboquant:bits=4")


def test_wrong_input_is_told(model_folder, tmp_path):
    out = ("--out", tmp_path / "a")
    (tmp_path / "short.txt").write_text("Too short.", encoding="utf-8")
    short = ("--text", tmp_path / "short.txt")
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("A sentence. " * 90, encoding="utf-8")
    many = [part for number in range(9) for part in ("--text", tmp_path / f"{number}.txt")]
    assert "from 9 texts" in bad("calibrate", model_folder, *out, *many, "--tokens", 900)
    assert "128 or more" in bad("calibrate", model_folder, *out, *short)
    for place in (out, ()):
        assert "none of these methods" in bad("calibrate", model_folder, *place, "--spec", "int8")
    assert "no folder" in bad("calibrate", model_folder, "--out", tmp_path / "no" / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_bytes(b"no calibration")
    options = ("--model", model_folder, "--tokens", 300, "--chunk", 64)
    bad("eval", "pca", *options, "--calibration", tmp_path / "a")
