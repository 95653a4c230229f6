"""What goes wrong with a store is counted and computed anew: the same tokens, and in time."""

import contextlib
import hashlib
import json
import time
from urllib.parse import quote

import pytest
import torch
from tcp_proxy import Proxy
from vllm_engine import sharing

from kvpact.errors import FormatError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.pages.page import codecs
from kvpact.integrations.vllm.connector_form import of_rank
from kvpact.prefixes.chunks import Chunk, ChunkKind
from kvpact.snapshot import Identity
from kvpact.spec import parse_spec
from kvpact.stores import open_store

CHUNK, CHUNKS, TIMEOUT = 64, 6, 2.0
TOKENS = CHUNK * CHUNKS
LIMIT = 15 * TIMEOUT
"""Seconds in which an answer is there, on a busy machine too; a hang has none."""


class Served:
    """An engine over a store, the line to the store's server, and the server."""

    def __init__(self, engine, line, server):
        self.engine, self.line, self.server = engine, line, server
        self._draw = torch.Generator().manual_seed(4)

    def ask(self, prompt):
        begin = time.monotonic()
        answer = self.engine.ask("greedy", prompts=[prompt], tokens=16)
        assert time.monotonic() - begin < LIMIT
        self.engine.ask("saved")
        assert self.engine.ask("forget")  # no page is held, and vLLM's own prefix cache is empty
        return answer

    def new_prompt(self):
        return torch.randint(3, 512, (TOKENS + 9,), generator=self._draw).tolist()

    def stored(self):
        """A new prompt, and its answer, which was computed; then the chunks are in the store."""
        prompt = self.new_prompt()
        with self.counting() as counts:
            answer = self.ask(prompt)
        assert counts["saved_chunks"] == CHUNKS
        return prompt, answer

    @contextlib.contextmanager
    def counting(self):
        """What is counted in the block, once it has ended."""
        before, counts = self.engine.ask("counts"), {}
        yield counts
        after = self.engine.ask("counts")
        counts.update({name: after[name] - before[name] for name in after})

    def loads(self):
        """A stored prompt is loaded; return the bytes that came from the server for it."""
        prompt, answer = self.stored()
        received = self.line.received
        with self.counting() as counts:
            assert self.ask(prompt) == answer
        assert counts["loaded_tokens"] == TOKENS
        return self.line.received - received

    def recovers(self):
        """A store that failed is asked again some time later: then prompts are loaded."""
        end = time.monotonic() + 60
        while True:
            try:
                return self.loads()
            except AssertionError:
                assert time.monotonic() < end

    def computes_what_fails_in_the_middle_of_a_load(self, fault):
        half = self.loads() // 2
        prompt, answer = self.stored()
        self.line.after(half, fault)
        with self.counting() as counts:
            assert self.ask(prompt) == answer
        assert counts["recomputed_tokens"] > 0
        assert counts["timeouts"] + counts["gone"] + counts["failures"] > 0


def serve(start_vllm, toy, url, line, server):
    options = {"model": toy, "dtype": "float32", "max_model_len": 512}
    extra = {"timeout": TIMEOUT, "chunk": CHUNK, "model": "toy"}
    with start_vllm("none", **options, **sharing(url, **extra)) as engine:
        yield Served(engine, line, server)


@pytest.fixture(scope="module")
def redis(start_vllm, start_server, toy, tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("redis"))
    with Proxy(server.port) as line:
        url = f"redis://:{quote(server.password)}@127.0.0.1:{line.port}"
        yield from serve(start_vllm, toy, url, line, server)
    server.kill()


@pytest.fixture(scope="module")
def mooncake(start_vllm, start_master, toy):
    master = start_master()
    with Proxy(master.port) as line:
        url = f"mooncake://127.0.0.1:{line.port}?admin={master.admin}&segment_size=64MiB&timeout=2"
        yield from serve(start_vllm, toy, url, line, master)
    master.kill()


@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_a_store_that_stands_still_in_the_middle_of_a_load(request, store):
    served = request.getfixturevalue(store)
    served.computes_what_fails_in_the_middle_of_a_load(served.line.freeze)
    served.ask(served.new_prompt())
    served.line.thaw()
    served.recovers()


@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_a_server_that_is_killed_in_the_middle_of_a_load(request, store):
    served = request.getfixturevalue(store)
    served.computes_what_fails_in_the_middle_of_a_load(served.server.kill)
    served.ask(served.new_prompt())
    assert served.server.start()
    served.recovers()


@pytest.fixture
def records(redis):
    """What redis holds, and what a new prompt brought there: the keys, the prompt, its answer."""
    client = pytest.importorskip("redis").Redis(
        port=redis.server.port, password=redis.server.password
    )
    client.flushall()
    yield client, *redis.stored()
    client.close()


def test_a_flipped_bit_in_a_stored_chunk(redis, records):
    client, prompt, answer = records
    for key in client.keys("kvpact:*"):
        record = bytearray(client.get(key))
        record[len(record) // 2] ^= 0x10
        client.set(key, bytes(record))
    with redis.counting() as counts:
        assert redis.ask(prompt) == answer
    assert (counts["loaded_tokens"], counts["recomputed_tokens"]) == (0, TOKENS)
    assert counts["damaged"] == counts["saved_chunks"] == CHUNKS
    assert counts["gone"] == counts["failures"] == 0
    (line,) = [x for x in redis.engine.log.splitlines() if "its checksum does not match" in x]
    assert "RedisStore('127.0.0.1:" in line and "-0of1" in line
    with redis.counting() as counts:
        assert redis.ask(prompt) == answer
    assert counts["loaded_tokens"] == TOKENS


@pytest.mark.parametrize("wrong", [
    {}, {"spec": "int:bits=8,sinks=0"}, {"model": "another"}, {"rank": 1},
], ids=["nothing", "spec", "model", "rank"])  # fmt: skip
def test_a_chunk_of_another_spec_model_or_rank_under_the_right_key(redis, records, wrong):
    _, prompt, answer = records
    right, other = kind_of(), kind_of(**wrong)
    zeros = torch.zeros(sum(other.slot_bytes), dtype=torch.uint8)
    parts = [prompt[i * CHUNK : (i + 1) * CHUNK] for i in range(CHUNKS)]
    password = redis.server.password
    with open_store(f"redis://127.0.0.1:{redis.server.port}", password=password) as store:
        for name in list(store):
            index, chunk = opened(right, store.get(name), parts)
            chunk = Chunk(zeros, chunk.sinks) if wrong else chunk
            store.put(name, other.seal(chunk, index, parts[index]))
    with redis.counting() as counts:
        assert redis.ask(prompt) == answer
    assert counts["damaged"] == (CHUNKS if wrong else 0)
    assert (counts["loaded_tokens"], counts["recomputed_tokens"])[bool(wrong)] == TOKENS


def kind_of(spec="none", model="toy", rank=0):
    """The kind of the engine's chunks, or of others."""
    parsed, dtype = parse_spec(spec), torch.float32
    # Of requests without tenant and salt.
    tenant = hashlib.blake2b(json.dumps(["", None]).encode(), digest_size=32).hexdigest()
    identity = of_rank(Identity(model=model, tenant=tenant), rank, 1 + rank)
    geometry = CacheGeometry(2, 2, 64, 64, dtype)
    pairs = (codecs(parsed, 64, 64, dtype),) * 2
    return ChunkKind((parsed,) * 2, geometry, pairs, identity, CHUNK)


def opened(kind, blob, parts):
    """The place of a chunk in its prompt, and the chunk."""
    for index, part in enumerate(parts):
        with contextlib.suppress(FormatError):
            return index, kind.unpack(blob, index, part)
    raise AssertionError("the engine's chunks are of another kind")


def test_a_full_store(redis, records):
    client, *_ = records
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (64 << 10))
    prompt = redis.new_prompt()
    with redis.counting() as counts:
        answer = redis.ask(prompt)
        assert redis.ask(prompt) == answer
    client.config_set("maxmemory", 0)
    assert counts["dropped"] > 0
    assert counts["loaded_tokens"] + counts["recomputed_tokens"] < TOKENS
    redis.loads()
