"""What a snapshot is, what it is refused for, and that a refusal changes nothing."""

import hashlib
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvpact import CacheGeometry, MLACache, PagedKVCache, Snapshot, create_cache, errors
from kvpact.compressor import CompressedKV
from kvpact.contract import AttendConfig
from kvpact.snapshot import Container, Identity, token_hash
from kvpact.snapshot.manifest import VERSIONS
from kvpact.testing.held import copied_tensors, difference

SPEC = "kivi:bits=4,sinks=2,window=10"
GEOMETRY = CacheGeometry(2, 2, 16, 8, torch.float16)


def tokens(count: int, seed: int = 0, rows: int = 2, dtype: torch.dtype = torch.float16):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(rows, 2, count, 16, generator=generator).to(dtype)
    return k, torch.randn(rows, 2, count, 8, generator=generator).to(dtype)


def filled(count: int = 200, spec: str = SPEC, geometry: CacheGeometry = GEOMETRY, rows: int = 2):
    cache = create_cache(spec, geometry)
    for layer in range(geometry.num_layers):
        cache.prefill(layer, *tokens(count, layer, rows, geometry.dtype or torch.float16))
    return cache


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return filled().snapshot(token_ids=torch.arange(400).view(2, 200))


def test_files(snapshot: Snapshot, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    snapshot.save(path)
    assert path.stat().st_size == snapshot.nbytes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again, mapped = Snapshot.load(path), Snapshot.open(path)
    assert again.to_bytes() == mapped.to_bytes() == path.read_bytes()
    assert again.digest == mapped.digest == snapshot.digest
    assert os.listdir(tmp_path) == ["a.safetensors"]
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError) as told:
        snapshot.save(tmp_path / "no" / "folder")
    assert told.value.filename == str(tmp_path / "no" / "folder")


def test_a_failed_save_leaves_what_was_there(snapshot: Snapshot, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.safetensors"
    snapshot.save(path)

    def fail(handle: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=f"no space left on device; make room there.*{path.name}"):
        snapshot.slice(0, 64).save(path)
    assert path.read_bytes() == snapshot.to_bytes()
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("wrong", [5, None, "text", memoryview(bytes(8))[::2]])
def test_what_is_not_bytes_is_refused_by_name(wrong):
    for read in (Snapshot.from_bytes, CompressedKV.from_bytes):
        with pytest.raises(errors.FormatError, match="is read from bytes"):
            read(wrong)


def test_the_safetensors_library_reads_it(snapshot: Snapshot, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    snapshot.save(path)
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["format"] == "kvpact.snapshot"
    assert torch.equal(found["token_ids"], torch.arange(400).view(2, 200).int())
    k = tokens(200)[0]
    assert torch.equal(found["layer.0.k.sinks"], k[:, :, :2])
    assert torch.equal(found["layer.0.k.tail"], k[:, :, 160:])


def test_the_document_says_how_to_read_it(snapshot: Snapshot):
    """A reader of its own, written from docs/snapshot-format.md."""
    data = snapshot.to_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    meta = header.pop("__metadata__")
    manifest = json.loads(meta["manifest"])
    last = end + header["checksums"]["data_offsets"][1]
    table = data[end:last]
    blank = data[:last].replace(meta["blake2b"].encode(), b"0" * 64)
    assert hashlib.blake2b(blank, digest_size=32).hexdigest() == meta["blake2b"]
    place, row = last, 0
    for repeat, sizes in manifest["sections"]:
        for size in sizes * repeat:
            digest = hashlib.blake2b(data[place : place + size], digest_size=16).digest()
            assert digest == table[16 * row : 16 * row + 16]
            place, row = place + size, row + 1
    assert place == len(data)
    pages = header["pages"]["data_offsets"]
    assert manifest["pages"] * sum(manifest["sections"][1][1]) == pages[1] - pages[0]
    # The first field of layer 0, K, of the second page is what the cache holds there.
    field = manifest["fields"][manifest["layers"][0]["k"]["fields"]][0]
    units = manifest["page_size"] // field["tokens"]
    shape = (2, 2, units, *field["shape"])
    start = end + pages[0] + sum(manifest["sections"][1][1])
    count = torch.Size(shape).numel()
    found = torch.frombuffer(bytearray(data[start : start + 4 * count]), dtype=torch.int32)
    store = filled()._layers[0].k.store
    held = store.source().gather(field["name"], 0, -(-160 // store.segment_tokens))
    assert field["dtype"] == "I32"
    assert torch.equal(found.view(shape), held[:, :, units : 2 * units])


def test_what_show_needs_is_in_the_header(snapshot: Snapshot):
    m = snapshot.manifest
    assert (snapshot.tokens, m.batch, m.page_size, m.layout) == (200, 2, 64, "contiguous")
    assert {s.packed for layer in m.layers for s in layer.streams} == {160}  # behind the window
    assert m.pages == 3
    assert snapshot.geometry == GEOMETRY
    assert m.token_hash == token_hash(snapshot.token_ids)
    assert m.layers[1].spec["key"]["method"] == "kivi"
    assert "tokens=200" in repr(snapshot)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(("spec", "shape", "error"), [
    (SPEC.replace("4", "2", 1), (2, 2, 16, 8, torch.float16), errors.SpecError),
    (SPEC.replace("10", "11"), (2, 2, 16, 8, torch.float16), errors.SpecError),
    (SPEC, (3, 2, 16, 8, torch.float16), errors.GeometryError),
    (SPEC, (2, 1, 16, 8, torch.float16), errors.GeometryError),
    (SPEC, (2, 2, 32, 8, torch.float16), errors.GeometryError),
    (SPEC, (2, 2, 16, 16, torch.float16), errors.GeometryError),
    (SPEC, (2, 2, 16, 8, torch.bfloat16), errors.DtypeError),
], ids=["spec", "window", "layers", "heads", "head_dim", "v_head_dim", "dtype"])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_changes(
    layout, spec, shape, error, snapshot: Snapshot
):
    geometry = CacheGeometry(*shape)
    if layout == "paged":
        cache = PagedKVCache(spec, geometry, 16).view()
    else:
        cache = create_cache(spec, geometry)
    for layer in range(geometry.num_layers):
        k = torch.ones(2, geometry.num_kv_heads, 30, geometry.head_dim, dtype=geometry.dtype)
        cache.prefill(layer, k, k[..., : geometry.value_dim])
    before = copied_tensors(cache)
    with pytest.raises(error):
        cache.restore(snapshot)
    assert difference(before, copied_tensors(cache)) == ""


def test_a_damaged_layer_changes_nothing(snapshot: Snapshot):
    data = bytearray(snapshot.to_bytes())
    data[-1] ^= 1
    damaged = Snapshot(Container(data, "kvpact.snapshot", *VERSIONS))
    contiguous, paged = filled(30), PagedKVCache(SPEC, GEOMETRY, 16)
    seq = paged.allocate()
    before = copied_tensors(contiguous), copied_tensors(paged.pool.storage), paged.num_free_pages
    for call in (lambda: contiguous.restore(damaged), lambda: paged.restore(damaged),
                 lambda: paged.restore(damaged, seq=seq)):  # fmt: skip
        with pytest.raises(errors.IntegrityError):
            call()
    assert difference(before[0], copied_tensors(contiguous)) == ""
    assert (paged.num_free_pages, paged.seq_len(seq)) == (before[2], 0)


def test_a_full_cache_is_named():
    snapshot = filled(200).snapshot()
    small = create_cache(SPEC, GEOMETRY, max_tokens=199)
    with pytest.raises(errors.CacheFull):
        small.restore(snapshot)
    pool = PagedKVCache(SPEC, GEOMETRY, 13)
    seq = pool.restore(snapshot, row=1)
    with pytest.raises(errors.CacheFull):
        pool.restore(snapshot)
    assert (pool.num_free_pages, pool.seq_len(seq)) == (6, 200)
    with pytest.raises(errors.GeometryError):
        pool.restore(snapshot, row=2)
    pool.free(seq)
    assert pool.num_free_pages == 13


def test_other_slots_and_parts_are_refused(snapshot: Snapshot):
    layers = [snapshot.layer(i) for i in range(2)]
    old = Snapshot.build(layers, slots=99, geometry=GEOMETRY, layout="x", page_size=64)
    for wrong in (old, snapshot.slice(64, 128)):
        with pytest.raises(errors.FormatError):
            create_cache(SPEC, GEOMETRY).restore(wrong)


def test_a_state_that_no_cache_could_be_in_is_refused(snapshot: Snapshot):
    layers = [snapshot.layer(i) for i in range(2)]
    k, v = layers[0].streams
    junk = {name: torch.full_like(x, 1) for name, x in k.slots.items()}
    wrong = {
        "slots behind the end": replace(k, slots=junk),
        "NaN": replace(k, tail=torch.full_like(k.tail, torch.nan)),
        "sinks": replace(k, sinks=None),
        "learnt": replace(k, learnt={"basis": torch.ones(2)}),
        "groups": replace(k, packed=k.packed - 32, start=k.start - 32,
                          tail=torch.cat([k.tail[:, :, :32], k.tail], 2)),
    }  # fmt: skip
    for name, stream in wrong.items():
        states = [replace(layers[0], streams=(stream, v)), layers[1]]
        made = Snapshot.build(states, slots=1, geometry=GEOMETRY, layout="x", page_size=64)
        cache = create_cache(SPEC, GEOMETRY)
        with pytest.raises(errors.FormatError):
            cache.restore(made)
        assert cache.seq_len() == 0, name


def test_slices_and_joins(snapshot: Snapshot):
    parts = [snapshot.slice(0, 64), snapshot.slice(64, 128), snapshot.slice(128)]
    assert [p.tokens for p in parts] == [64, 128, 200]
    assert sum(p.nbytes for p in parts[:2]) < snapshot.nbytes
    whole = Snapshot.join(parts, token_ids=snapshot.token_ids)
    assert whole.to_bytes() == snapshot.to_bytes()
    assert torch.equal(parts[0].token_ids, snapshot.token_ids[:, :64])
    # A prefix is what a rollback to it leaves, once the window is behind it.
    cache = filled()
    cache.truncate(64)
    restored = create_cache(SPEC, GEOMETRY)
    restored.restore(parts[0])
    assert restored.snapshot().digest == cache.snapshot().digest
    for start, end in ((0, 63), (1, 64), (0, 256), (64, 0), (256, None)):
        with pytest.raises(errors.GeometryError):
            snapshot.slice(start, end)
    with pytest.raises(errors.GeometryError):
        Snapshot.join([parts[0], parts[2]])
    with pytest.raises(errors.MismatchError):
        other = filled().snapshot(identity=Identity(model="other"))
        Snapshot.join([parts[0], other.slice(64, 128)])


def test_rows(snapshot: Snapshot):
    one = filled(rows=2)
    one.select(torch.tensor([1, 1, 0]))
    assert snapshot.select([1, 1, 0]).digest == one.snapshot().digest
    with pytest.raises(errors.GeometryError):
        snapshot.select([2])


def test_sequences_of_unlike_length_are_no_rows_of_one_snapshot():
    cache = PagedKVCache(SPEC, GEOMETRY, 16)
    seqs = [cache.allocate(), cache.allocate()]
    for layer in range(2):
        for count, seq in zip((40, 50), seqs, strict=True):
            k, v = tokens(count, layer, 1)
            cache.append(layer, {seq: (k[0], v[0])})
    with pytest.raises(errors.GeometryError, match="40, 50"):
        cache.snapshot(seqs)
    copy = cache.restore(cache.snapshot(seqs[1]))
    assert cache.snapshot(copy).digest == cache.snapshot(seqs[1]).digest
    assert cache.restore(cache.snapshot(seqs[0]), seq=copy) == copy
    assert cache.snapshot(copy).digest == cache.snapshot(seqs[0]).digest


def test_a_shared_page_cut_by_a_rollback_gives_no_token_that_went():
    cache = PagedKVCache("int:bits=4,sinks=0,window=0", GEOMETRY, 16)
    seq = cache.allocate()
    for layer in range(2):
        k, v = tokens(30, layer, 1)
        cache.append(layer, {seq: (k[0], v[0])})
    fork = cache.fork(seq)
    cache.truncate(fork, 20)
    alone = filled(20, "int:bits=4,sinks=0,window=0", rows=1)
    alone.reset()
    for layer in range(2):
        alone.prefill(layer, *(x[:, :, :20] for x in tokens(30, layer, 1)))
    shared, whole = cache.snapshot(fork), alone.snapshot()
    for layer in range(2):
        one, two = (x.layer(layer).streams[0].slots["codes"] for x in (shared, whole))
        assert torch.equal(one, two)


def test_codecs_that_learnt_other_things_are_refused():
    k, v = tokens(300)
    calibrations = [{i: (x, y) for i in range(2)} for x, y in ((k, v), tokens(300, 9))]
    given = ("vq:codebook_size=8", GEOMETRY, 20)
    one, other = (PagedKVCache(*given, calibration=x) for x in calibrations)
    seq = one.allocate()
    for layer in range(2):
        one.append(layer, {seq: (k[0], v[0])})
    snapshot = one.snapshot(seq)
    with pytest.raises(errors.MismatchError, match="calibration=snapshot"):
        other.restore(snapshot)
    assert other.num_free_pages == 20
    fresh = PagedKVCache(*given, calibration=snapshot)
    assert fresh.snapshot(fresh.restore(snapshot)).digest == snapshot.digest


def test_identity():
    snapshot = filled().snapshot(identity=Identity(model="a", tenant="t"))
    snapshot.require(model="a", adapter=None)
    for wrong in ({"model": "b"}, {"adapter": "x"}, {"tenant": None}):
        with pytest.raises(errors.MismatchError):
            snapshot.require(**wrong)


def test_empty_caches():
    empty = create_cache(SPEC, GEOMETRY).snapshot()
    assert empty.tokens == 0
    cache = filled()
    cache.restore(Snapshot.from_bytes(empty.to_bytes()))
    assert (cache.seq_len(), cache.batch_size) == (0, None)
    view = PagedKVCache(SPEC, GEOMETRY, 8).view()
    view.restore(empty)
    assert view.seqs is None and view.snapshot().tokens == 0


def test_a_pending_result_is_stale_after_a_restore(snapshot: Snapshot):
    cache = filled()
    result = cache.prefill(0, *tokens(5))
    cache.restore(snapshot)
    with pytest.raises(errors.StaleResult):
        _ = result.k


def test_wrong_page_sizes_and_ids():
    cache = filled()
    for size in (0, -32, 16, 33, True, "64"):
        with pytest.raises(errors.GeometryError):
            cache.snapshot(page_size=size)
    for ids in (torch.ones(3, 5), torch.ones(3, 5).long(), "text", [2**70]):
        with pytest.raises(errors.GeometryError):
            cache.snapshot(token_ids=ids)
    wide = cache.snapshot(token_ids=[[2**40] * 3, [1, 2, 3]])
    assert wide.token_ids[0, 0] == 2**40


@pytest.mark.parametrize("spec", ["turboquant:bits=4,window=8", "kivi:bits=4,window=8"])
def test_latents(spec: str):
    """MLA: `c_kv` in K's place, `k_rope` in V's; contiguous to contiguous and over pages."""
    cache = MLACache(spec, 2, 32, 16)
    config = AttendConfig(softmax_scale=0.2)

    def call(to, seed: int, count: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((2, 1, count, 32), (2, 1, count, 16), (2, 4, count, 48))
        c, rope, q = (torch.randn(*shape, generator=generator) for shape in shapes)
        return [to.attend(layer, k=c, v=rope, q=q, config=config) for layer in range(2)]

    call(cache, 0, 150)
    snapshot = Snapshot.from_bytes(cache.snapshot().to_bytes())
    assert snapshot.geometry.latent
    restored = MLACache(spec, 2, 32, 16)
    restored.restore(snapshot)
    paged = PagedKVCache(spec, snapshot.geometry, 20).view()
    paged.restore(snapshot)
    wanted = call(cache, 1, 7)
    assert all(map(torch.equal, call(restored, 1, 7), wanted))
    for x, y in zip(call(paged, 1, 7), wanted, strict=True):
        torch.testing.assert_close(x, y)
    assert restored.snapshot().digest == cache.snapshot().digest
    plain = create_cache(spec, CacheGeometry(2, 1, 32, 16))
    with pytest.raises(errors.GeometryError):
        plain.restore(snapshot)


def test_rows_go_into_as_many_different_sequences(snapshot: Snapshot):
    cache = PagedKVCache(SPEC, GEOMETRY, 64)
    seqs = [cache.allocate() for _ in range(2)]
    free = cache.num_free_pages
    for rows, wanted in (([0, 1], seqs[:1]), ([0], seqs), ([0, 1], [seqs[0], seqs[0]])):
        with pytest.raises(errors.SequenceError, match="different sequences"):
            cache.restore_state(snapshot.state(), rows, wanted)
        assert cache.num_free_pages == free
    assert cache.restore_state(snapshot.state(), [1, 0], seqs) == seqs


def test_a_slice_has_no_sinks_from_behind_its_end():
    cache = create_cache(SPEC, GEOMETRY)
    for layer in range(2):
        config = AttendConfig(padding=torch.tensor([63, 0]))
        cache.prefill(layer, *tokens(200, layer), None, config)
    for stream in cache.snapshot().slice(0, 64).layer(0).streams:
        first, second = stream.sinks.unbind(2)
        assert first[0].any() and not second[0].any()
        assert second[1].any()
