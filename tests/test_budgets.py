"""Packages that outgrow their budget of lines are named."""

from budgets import complaints, found


def test_lines_are_counted_by_package(tmp_path):
    source = tmp_path / "src" / "kvpact"
    for name, text in (
        ("spec.py", "a\nb\n"),
        ("cache/layer.py", "a\n" * 7),
        ("cache/deep/er.py", "a\n"),
        ("kernels/cpu/one.cpp", "a\n" * 3),
        ("kernels/cpu/README.md", "a\n" * 9),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, "utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("a\n", "utf-8")
    counts = {"cache": 8, "kernels": 3, "(files)": 2, "src": 13, "tests": 1}
    assert found(tmp_path) == counts
    assert complaints(counts, counts) == []
    assert complaints(counts | {"cache": 7}, counts) == [
        "cache has 8 lines, 1 more than its budget of 7"
    ]
    assert complaints(counts | {"gone": 5}, {**counts, "new": 1}) == [
        "gone has a budget and is not there",
        "new has no budget in ARCHITECTURE.md",
    ]
