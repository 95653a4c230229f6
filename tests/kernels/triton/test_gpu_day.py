"""What `tools/gpu_day.sh` compares on a machine with a GPU, interpreted."""

import pytest

pytest.importorskip("triton")

from gpu_compare import Case, differences


def test_a_case_is_right_or_told_to_be_wrong(triton_backend, monkeypatch):
    case, attend = Case("int:bits=8,window=0", (40, 1), groups=1), triton_backend.attend
    assert differences(case, {}) == ([], pytest.approx(0, abs=5e-4))
    monkeypatch.setattr(triton_backend, "attend", lambda calls: attend(calls) * 1.001)
    wrong, _ = differences(case, kept := {})
    assert wrong[0].startswith("attention of call 0: error 1.0e-03")
    assert {"k 0", "v 0", "q 0", "wanted 0", "got 0"} <= kept.keys()
