"""What `tools/gpu_day.sh` compares on a machine with a GPU, interpreted."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import metadata
from gpu_compare import KERNELS, Case, differences

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
CASE = Case("int:bits=8,window=0", (40, 1), groups=1)


def test_caches_that_agree(triton_backend):
    wrong, worst = differences(CASE, kept := {})
    assert wrong == [] and kept == {}
    assert 0 < worst <= 5e-4


def test_what_is_wrong_is_told_and_kept(triton_backend, monkeypatch):
    attend = triton_backend.attend
    monkeypatch.setattr(triton_backend, "attend", lambda calls: attend(calls) * 1.001)
    encoder = triton_backend.encoder

    def damaged(codec):
        made = encoder(codec)
        write = made.write

        def written(prepared, segments, *rest):
            write(prepared, segments, *rest)
            segments[0]["codes"].view(torch.uint8).view(-1)[0] ^= 1

        monkeypatch.setattr(made, "write", written)
        return made

    monkeypatch.setattr(triton_backend, "encoder", damaged)
    wrong, worst = differences(CASE, kept := {})
    assert worst == pytest.approx(1e-3, rel=0.3)
    assert any(text.startswith("attention of call 0: error 1.0e-03") for text in wrong)
    assert any(text.startswith("codes 0, 0: 1 of ") for text in wrong)
    assert {"k 0", "v 0", "q 0", "wanted 0", "got 0"} <= kept.keys()


def test_kernels_are_named():
    assert {"attend_digits", "attend_general", "take_tokens", "store_codes"} <= KERNELS


def test_entry_points_of_a_source_tree(tmp_path):
    metadata.write(PROJECT, tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    wanted = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["entry-points"]
    given: dict[str, dict[str, str]] = {}
    for point in found.entry_points:
        given.setdefault(point.group, {})[point.name] = point.value
    assert given == wanted
    assert found.metadata["Name"] == "kvpact"
