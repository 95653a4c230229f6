"""Slots that `tests/golden/make.py` stored once stay readable, and are stored the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kvpact
from kvpact.formats import FORMAT_VERSION
from kvpact.methods.fitted import FittedMethod
from kvpact.registry import Alias
from kvpact.spec import Spec

FOLDER = Path(__file__).parents[1] / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))
# Methods that are fitted have golden files with what they learnt: tests/compressor/golden.
OWN = {
    name: method
    for name, method in kvpact.list_methods().items()
    if not isinstance(method, Alias)
    and method.__module__.startswith("kvpact.methods.")
    and not issubclass(method, FittedMethod)
}


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def cases() -> list:
    held = [(path, case) for path in FILES for case in json.loads(load(path)[1]["cases"])]
    return [pytest.param(path, *case, id=case[0]) for path, case in held]


@pytest.mark.parametrize("name", OWN)
def test_every_method_has_a_golden_file_of_its_version(name):
    path = FOLDER / f"{name}-v{OWN[name].version}-format{FORMAT_VERSION}.safetensors"
    assert path.is_file(), f"{path.name} is missing: see tests/golden/make.py"
    metadata = load(path)[1]
    assert metadata["method"] == name
    assert metadata["method_version"] == str(OWN[name].version)
    assert metadata["format_version"] == str(FORMAT_VERSION)


def test_there_are_as_many_cases_as_were_made():
    assert len(cases()) == 22 and len(FILES) == 9
    assert sum(path.stat().st_size for path in FILES) < 450_000


def fresh_slots(codec, x: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Encode and write the complete groups in two pieces, into storage as long as the golden."""
    tokens = x.shape[2] // codec.group * codec.group
    cut = tokens // 2 // codec.group * codec.group
    slots = {}
    for field in codec.fields:
        size = like[field.name].shape[2] * field.tokens
        slots[field.name] = field.allocate(1, 1, size, x.device)
    for start, end in ((0, cut), (cut, tokens)):
        if start < end:
            arrays = codec.encode(x[:, :, start:end].float())
            for field in codec.fields:
                field.write(slots[field.name], start, arrays[field.name])
    return slots


@pytest.mark.parametrize(("path", "text", "data"), cases())
def test_golden_slots(path, text, data):
    tensors, metadata = load(path)
    spec, shown = Spec.from_json(data), json.loads(metadata["shown"])
    assert spec == kvpact.parse_spec(text)
    given = {side: tensors[f"input|{side}"] for side in "kv"}
    for side, make in (("k", spec.key.key_codec), ("v", spec.value.value_codec)):
        codec = make(given[side].shape[3], given[side].dtype)
        stored = {f.name: tensors[f"{text}|{side}|{f.name}"] for f in codec.fields}
        # The same input gives the same bytes …
        for name, tensor in fresh_slots(codec, given[side], stored).items():
            golden = stored[name]
            assert tensor.dtype == golden.dtype and tensor.shape == golden.shape
            assert torch.equal(tensor.view(torch.uint8), golden.view(torch.uint8)), name
        # … and the stored bytes decode to the same values, to the last bit.
        arrays = {field.name: field.read(stored[field.name]) for field in codec.fields}
        decoded = codec.transform.inverse(codec.decode(arrays))[:, :, shown]
        expected = tensors[f"{text}|{side}|expected"]
        assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))
