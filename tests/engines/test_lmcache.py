"""vLLM with LMCache's server and connector, and kvpact's serde between memory and files."""

import re
import shutil
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from lmcache_server import CHUNK, LMCacheServer
from mooncake_cluster import why_not
from vllm_prompts import ids

from kvpact.integrations.chunks import ChunkFormat
from kvpact.integrations.lmcache.layout import ChunkLayout, cpu_pages
from kvpact.integrations.lmcache.server import key_hash
from kvpact.integrations.transformers.versions import cache_of, named

UNABLE = why_not() if find_spec("mooncake") else None
pytestmark = [
    pytest.mark.skipif(find_spec("lmcache") is None, reason="LMCache is not installed"),
    pytest.mark.skipif(bool(UNABLE), reason=f"LMCache's server imports Mooncake, and {UNABLE}"),
]

# vLLM's pages in these engines have 32 tokens.
SERDE = {"spec": "turboquant:bits=4", "head_dim": 64, "cpu_block_size": 32}
LAYERS, HEADS, NEW = 2, 2, 16
SHAPE = (LAYERS, CHUNK, HEADS * 2 * 64)
# transformers computes in fp32 what vLLM does, so tokens can be compared.
OPTIONS = {"dtype": "float32", "max_model_len": 512, "processes": True}


PROMPTS = {"whole": ids(200, 1), "flipped": ids(210, 2), "swapped": ids(150, 3), "cut": ids(140, 4)}
CHUNKS = {name: len(prompt) // CHUNK for name, prompt in PROMPTS.items()}


@cache
def form():
    return ChunkFormat(SERDE["spec"], ChunkLayout(64, 64, cpu_pages(32, 64)))


def read(path):
    """Return a file's K and V, `[L, H, T, D]`."""
    from lmcache.v1.distributed.api import ObjectKey

    model, rank, group, digest = path.stem.split("@")
    key = ObjectKey(bytes.fromhex(digest), model.replace("-SEP-", "/"), int(rank, 16), int(group))
    chunk = torch.zeros(SHAPE)
    form().unpack(path.read_bytes(), key_hash(key), [chunk])
    return form().layout.split(chunk)


class Model:
    """transformers' own implementation of the toy."""

    def __init__(self, folder):
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def chunks(self, prompt):
        """Return K and V of a prompt's chunks, `[L, H, T, D]` each."""
        held = cache_of(self._model(torch.tensor([prompt]), use_cache=True))
        k, v = (torch.stack(x) for x in zip(*[(one[0][0], one[1][0]) for one in held], strict=True))
        whole = len(prompt) // CHUNK * CHUNK
        sides = (x[:, :, :whole].split(CHUNK, dim=2) for x in (k, v))
        return list(zip(*sides, strict=True))

    @torch.no_grad()
    def tokens(self, prompt, chunks=()):
        """Return the greedy answer to a prompt whose first chunks have K and V as given."""
        from transformers import DynamicCache

        held = DynamicCache()
        for k, v in chunks:
            for layer in range(LAYERS):
                held.update(k[layer][None], v[layer][None], layer)
        new, answer = prompt[CHUNK * len(chunks) :], []
        for _ in range(NEW):
            logits = self._model(torch.tensor([new]), **named(held), use_cache=True).logits
            new = [int(logits[0, -1].argmax())]
            answer += new
        return answer


@pytest.fixture(scope="module")
def model(toy):
    return Model(toy)


def ask(engine, name):
    (answer,) = engine.ask("greedy", prompts=[PROMPTS[name]], tokens=NEW)
    return answer


@pytest.fixture(scope="module")
def stored(start_vllm, toy, tmp_path_factory):
    """What an engine answered and its server stored, and of a serde whose width does not fit."""
    path, other = tmp_path_factory.mktemp("chunks"), tmp_path_factory.mktemp("other")
    with LMCacheServer((path, SERDE), (other, {**SERDE, "head_dim": 96})) as server:
        with start_vllm(model=toy, kv_transfer_config=server.for_vllm, **OPTIONS) as engine:
            answers = {name: ask(engine, name) for name in PROMPTS}
        counts = server.written(lambda serdes: serdes[0]["stored"] == sum(CHUNKS.values()))
    return SimpleNamespace(answers=answers, counts=counts, path=path, other=other, log=server.log)


@pytest.fixture(scope="module")
def files(stored, model):
    """The file of each prompt's chunks, found by what is in it."""
    given = {
        (name, index): torch.cat(pair, -1)
        for name, prompt in PROMPTS.items()
        for index, pair in enumerate(model.chunks(prompt))
    }
    found = {}
    for path in stored.path.iterdir():
        held = torch.cat(read(path), -1)
        errors = {which: float((held - x).norm() / x.norm()) for which, x in given.items()}
        which = min(errors, key=errors.get)
        # Of normal tokens this spec loses .094 (`TurboQuant.examples` allows .1).
        assert errors[which] < 0.11
        found[which] = path
    assert found.keys() == given.keys()
    return found


def test_files_have_the_bytes_that_were_said_before(stored, files):
    size = form().nbytes([(SHAPE, torch.float32)])
    assert {path.stat().st_size for path in files.values()} == {size}
    mine, other = stored.counts
    assert mine["stored"] == len(files) == sum(CHUNKS.values())
    assert mine["stored_bytes"] == size * len(files)
    assert mine["given_bytes"] == 4 * torch.Size(SHAPE).numel() * len(files)
    # LMCache gives up a request's chunks at the first that fails.
    assert (other["stored"], other["not_stored"]) == (0, len(PROMPTS))
    assert list(stored.other.iterdir()) == []
    # Each reason once: what the shape of chunks tells, and the model's config.
    reasons = re.findall(r"kvpact stores nothing of this engine: (\S+)", stored.log)
    assert sorted(reasons) == ["LMCache's", "head_dim=96"]
    assert "have the widths 64 and 64: set these" in stored.log
    assert f"kvpact: {mine}" in stored.log


def test_a_second_engine_loads_chunks_and_computes_damaged_ones(
    start_vllm, toy, model, stored, files, tmp_path
):
    path = tmp_path / "chunks"
    shutil.copytree(stored.path, path)
    here = {which: path / file.name for which, file in files.items()}
    flipped, swapped, cut = here["flipped", 1], here["swapped", 0], here["cut", 0]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    swapped.write_bytes(here["whole", 0].read_bytes())
    cut.write_bytes(cut.read_bytes()[:-1])

    def loaded(name):
        pairs = [read(files[name, index]) for index in range(CHUNKS[name])]
        return model.tokens(PROMPTS[name], pairs)

    with (
        LMCacheServer((path, SERDE)) as server,
        start_vllm(model=toy, kv_transfer_config=server.for_vllm, **OPTIONS) as engine,
    ):
        answers = {name: ask(engine, name) for name in PROMPTS}
        metrics = engine.ask("metrics")
        (counts,) = server.written(lambda _: flipped.exists() and swapped.exists())
        assert answers == {**stored.answers, "whole": loaded("whole")}
        assert answers["whole"] != stored.answers["whole"]
        assert metrics["vllm:external_prefix_cache_hits"] == CHUNK * CHUNKS["whole"]
        assert (counts["damaged"], counts["mismatched"]) == (2, 0)
        assert server.log.count("is computed again") == 2

        # What was removed has been stored anew; what LMCache calls a miss itself stays as it is.
        for which in (("flipped", 1), ("swapped", 0)):
            for new, old in zip(read(here[which]), read(files[which]), strict=True):
                torch.testing.assert_close(new, old)
        server.forget()
        assert engine.ask("forget")
        again = {name: ask(engine, name) for name in PROMPTS}
        assert again == {**{name: loaded(name) for name in PROMPTS}, "cut": stored.answers["cut"]}
        assert server.counts()[0]["damaged"] == 2
        assert engine.ask("forget")


def test_chunks_of_a_calibrated_trellis_are_loaded_with_the_same_calibration_alone(
    start_vllm, toy, calibrated, tmp_path
):
    def serve(seed):
        """What an engine computes or loads at first, what it loads later, and the counts."""
        calibration = str(calibrated(toy, seed=seed))
        serde = {**SERDE, "spec": "trellis:bits=4", "calibration": calibration}
        with (
            LMCacheServer((tmp_path, serde)) as server,
            start_vllm(model=toy, kv_transfer_config=server.for_vllm, **OPTIONS) as engine,
        ):
            first = ask(engine, "whole")
            (counts,) = server.written(lambda c: c[0]["stored"] + c[0]["loaded"] >= whole)
            server.forget()
            assert engine.ask("forget")
            return first, ask(engine, "whole"), counts, server.counts()[0]

    whole = CHUNKS["whole"]
    computed, loaded, before, after = serve(0)
    assert (before["stored"], before["loaded"], after["loaded"]) == (whole, 0, whole)
    assert before["stored_bytes"] < 0.2 * before["given_bytes"]  # of fp32
    found, again, before, after = serve(0)
    assert (found, again) == (loaded, loaded)
    assert (before["stored"], after["loaded"], after["mismatched"]) == (0, 2 * whole, 0)
    other, _, before, _ = serve(1)
    assert other == computed
    assert (before["loaded"], before["damaged"]) == (0, 0) and before["mismatched"] > 0


def test_a_method_whose_bytes_are_not_known_before_is_refused_at_start(tmp_path):
    server = LMCacheServer((tmp_path, {**SERDE, "spec": "vq", "cpu_block_size": 0}))
    assert not server.answered and "the method of K learns from its tokens" in server.log
