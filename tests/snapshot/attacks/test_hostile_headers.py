"""Headers made to do harm are refused before anything large is allocated."""

import json
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvpact import CacheGeometry, Snapshot, create_cache
from kvpact.errors import FormatError, IntegrityError, KVPactError
from kvpact.snapshot.container import Container, _root
from kvpact.snapshot.header import MAX_HEADER, dump_json
from kvpact.snapshot.manifest import read_manifest

HUGE = 2**62


def header(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    text += b" " * (-len(text) % 8)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensors(**entries: object) -> bytes:
    meta = {"blake2b": "0" * 64, "format": "kvpact.snapshot", "manifest": "{}", "version": "1"}
    return header(dump_json({"__metadata__": meta, **entries}), b"\0" * 64)


def entry(dtype="U8", shape=(64,), offsets=(0, 64)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "no header": b"\0" * 8,
    "length of 2**63": header("{}", length=2**63),
    "length of all bits": header("{}", length=2**64 - 1),
    "length beyond the file": header("{}", length=4096),
    "length that is no multiple of 8": header("{}        ", length=9),
    "a header beyond the limit": header(b"[" * (MAX_HEADER + 8)),
    "deep lists": header(b"[" * 500_000),
    "deep objects": header(b'{"a":' * 100_000),
    "deep manifest": header(
        dump_json({"__metadata__": {"format": "kvpact.snapshot", "manifest": "[" * 200_000}})
    ),
    "many empty lists": header("[" + ",".join(["[]"] * 300_000) + "]"),
    "a number of many digits": header('{"__metadata__":' + "9" * 100_000 + "}"),
    "a number beyond floats": header('{"__metadata__":1e999}'),
    "NaN": header('{"__metadata__":NaN}'),
    "no UTF-8": header(b'{"\xff\xfe":1}'),
    "no object": header("[1,2]"),
    "no metadata": header(dump_json({"a": entry()}), b"\0" * 64),
    "metadata that is no object": header('{"__metadata__":[]}'),
    "metadata of numbers": header('{"__metadata__":{"format":1}}'),
    "a key twice": header('{"__metadata__":{},"__metadata__":{}}'),
    "blanks": header('{"__metadata__": {}}'),
    "escapes": header('{"__metad\\u0061ta__":{}}'),
    "huge shape": tensors(a=entry(shape=(HUGE, HUGE), offsets=(0, 64))),
    "huge rank": tensors(a=entry(shape=[1] * 1000)),
    "negative shape": tensors(a=entry(shape=(-8, -8))),
    "shape of true": tensors(a=entry(shape=(True, 64))),
    "shape of floats": tensors(a=entry(shape=(64.0,))),
    "shape of text": tensors(a=entry(shape="64")),
    "huge offsets": tensors(a=entry(shape=(HUGE,), offsets=(0, HUGE))),
    "negative offsets": tensors(a=entry(offsets=(-64, 0))),
    "offsets that end first": tensors(a=entry(offsets=(64, 0))),
    "three offsets": tensors(a=entry(offsets=(0, 32, 64))),
    "overlap": tensors(a=entry(), b=entry()),
    "a gap": tensors(a=entry(shape=(8,), offsets=(0, 8)), b=entry(shape=(8,), offsets=(56, 64))),
    "bytes left over": tensors(a=entry(shape=(8,), offsets=(0, 8))),
    "unknown dtype": tensors(a=entry(dtype="F7")),
    "dtype of a list": tensors(a=entry(dtype=["U8"])),
    "unknown keys": tensors(a={**entry(), "more": 1}),
    "missing keys": tensors(a={"dtype": "U8"}),
    **{
        f"name {name!r}"[:40]: tensors(**{name: entry()})
        for name in ("../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "..", ".a", "", "a\0b",
                     "C:a", "a" * 300, "é", "a b", "a..b")
    },
}  # fmt: skip


@contextmanager
def no_more_memory_than(most: int):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", HOSTILE.values(), ids=list(HOSTILE))
def test_refused_without_memory(data: bytes, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    for read in (lambda: Snapshot.from_bytes(data), lambda: Snapshot.open(path)):
        # The header itself is read, and parsed at about 30 times its size at worst.
        most = 1_000_000 + 40 * min(len(data), MAX_HEADER)
        with no_more_memory_than(most), pytest.raises(FormatError):
            read()


def forged(manifest: object, table: int = 0, version: str = "1", kind: str = "kvpact.snapshot"):
    """Return a file whose checksums are right and whose manifest is what it is."""
    meta = {"blake2b": "0" * 64, "format": kind, "manifest": dump_json(manifest)}
    meta["version"] = version
    sums = {"dtype": "U8", "shape": [table, 16], "data_offsets": [0, 16 * table]}
    body = b"\0" * 16 * table
    data = header(dump_json({"__metadata__": meta, "checksums": sums}))
    digest = _root(data, body).encode()
    at = data.index(b"0" * 64)
    return data[:at] + digest + data[at + 64 :] + body


@pytest.fixture(scope="module")
def manifest() -> dict:
    snapshot = create_cache("int:bits=4", CacheGeometry(1, 1, 4)).snapshot()
    return json.loads(dump_json(snapshot._container.manifest))


def test_a_forged_file_that_is_right_is_read(manifest: dict):
    data = forged({**manifest, "sections": [[1, [0, 0]], [0, [0]]]}, table=2)
    with pytest.raises(IntegrityError):  # the sums are zero
        Snapshot.from_bytes(data)
    assert Snapshot(Container(data, "kvpact.snapshot", 1)).tokens == 0


@pytest.mark.parametrize("change", [
    {"sections": [[HUGE, [0]]]}, {"sections": [[2, [HUGE]]]}, {"sections": [[-2, [0]]]},
    {"sections": [[2, [-1]]]}, {"sections": [[1, [True, 0]]]}, {"sections": [[HUGE, []]]},
    {"sections": [1, 2]}, {"sections": None}, {"sections": [[2, [0]]]}, {"batch": HUGE},
    {"batch": -1}, {"batch": True}, {"page_size": 0}, {"page_size": HUGE}, {"page_size": 1.5},
    {"pages": HUGE}, {"pages": 1}, {"begin": 1}, {"begin": -64}, {"slots": "1"},
    {"geometry": {"num_layers": HUGE}}, {"geometry": {}}, {"geometry": []}, {"layers": []},
    {"layers": [{"spec": 9}]}, {"layers": [{"spec": -1}]},
    {"layers": [{"spec": 0, "k": 1, "v": 1, "dtype": "F16"}]}, {"layers": [[]]},
    {"layers": {"0": 1}}, {"layout": 3}, {"specs": "int"}, {"paddings": [[1, 2]]},
    {"paddings": [[-1]]},
    {"fields": [[{"dtype": "I32", "name": "x", "shape": [HUGE], "tokens": 32}]]},
    {"fields": [[{"dtype": "I32", "name": "x", "shape": [1], "tokens": 0}]]},
    {"fields": [[{"dtype": "I99", "name": "x", "shape": [1], "tokens": 32}]]}, {"fields": [1]},
    {"identity": {"model": "x" * 2000, "adapter": None, "tenant": None}}, {"identity": None},
    {"token_hash": 1}, {"unknown": 1},
], ids=str)  # fmt: skip
def test_a_manifest_with_right_checksums_and_wrong_contents(change: dict, manifest: dict):
    wrong = {**manifest, "sections": [[1, [0, 0]], [0, [0]]], **change}
    data = forged(dict(sorted(wrong.items())), table=2)
    with no_more_memory_than(1_000_000), pytest.raises(FormatError):
        Snapshot.from_bytes(data)


@pytest.mark.parametrize(("version", "kind"), [("6", "kvpact.snapshot"), ("1", "other"), ("", "")])
def test_unknown_versions_are_named(version: str, kind: str, manifest: dict):
    data = forged({**manifest, "sections": [[1, [0, 0]], [0, [0]]]}, 2, version, kind)
    with pytest.raises(FormatError, match="can be read"):
        Snapshot.from_bytes(data)


def test_every_key_of_a_manifest_is_needed(manifest: dict):
    for key in manifest:
        rest = {name: value for name, value in manifest.items() if name != key}
        with pytest.raises(KVPactError):
            Snapshot.from_bytes(forged(rest, table=2))


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_manifest_of_unlike_numbers_of_k_and_v_is_refused(side: str):
    cache = create_cache("int:bits=4", CacheGeometry(1, 1, 4))
    cache.prefill(0, torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4))
    known = json.loads(dump_json(cache.snapshot()._container.manifest))
    assert read_manifest(known).tokens == 9
    known["layers"][0][side]["tail"] += 1
    with pytest.raises(FormatError, match="unlike length"):
        read_manifest(known)
