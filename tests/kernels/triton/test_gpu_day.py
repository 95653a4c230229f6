"""What `tools/gpu_day.sh` compares on a machine with a GPU, interpreted."""

import pytest

pytest.importorskip("triton")

from gpu_compare import Case, differences

CASE = Case("int:bits=8,window=0", (40, 1), groups=1)


def test_caches_that_agree(triton_backend):
    assert differences(CASE, {}) == ([], pytest.approx(0, abs=5e-4))


def test_what_is_wrong_is_told_and_kept(triton_backend, monkeypatch):
    attend = triton_backend.attend
    monkeypatch.setattr(triton_backend, "attend", lambda calls: attend(calls) * 1.001)
    wrong, worst = differences(CASE, kept := {})
    assert worst == pytest.approx(1e-3, rel=0.3)
    assert wrong[0].startswith("attention of call 0: error 1.0e-03")
    assert {"k 0", "v 0", "q 0", "wanted 0", "got 0"} <= kept.keys()
