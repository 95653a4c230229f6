"""A calibrated `trellis` in real engines: capacity, answers, prefixes, two ranks, refusals."""

from dataclasses import replace
from urllib.parse import quote

import pytest
import torch
from vllm_engine import sharing
from vllm_prompts import ids, random_requests

from kvpact.calibration import Calibration
from kvpact.stores import open_store

SPEC = "trellis:bits=4,sinks=0"
ALONE = "trellis:bits=4,center=0,sinks=0"
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "block_size": 128}


def named(path):
    return {"KVPACT_VLLM_CALIBRATION": str(path)}


@pytest.fixture(scope="session")
def known(calibrated, toy):
    return calibrated(toy)


@pytest.mark.parametrize("spec", [SPEC, ALONE])
def test_it_holds_so_many_times_the_tokens_of_bfloat16(run_vllm, toy, known, spec):
    options = {"model": toy, **OPTIONS}
    own, mine = run_vllm(**options), run_vllm(spec, env=named(known), **options)
    assert mine["capacity"] >= 3.7 * own["capacity"] and f"as {spec}: " in mine["log"]
    assert f"learnt from 1024 tokens ({known})" in mine["log"]


def answers(start_vllm, requests, spec, options, **more):
    with start_vllm(spec, **options, **more) as engine:
        found = engine.ask("sequence", requests=requests)
        metrics = engine.ask("metrics")
        assert engine.ask("forget")  # no page is held any more
    return found, metrics


@pytest.mark.parametrize("spec", [SPEC, ALONE])
def test_random_requests_together_answer_as_one_by_one(start_vllm, toy, known, spec):
    """No prompt is cut and no prefix shared, so nothing depends on who else is there."""
    requests = random_requests(seed=3)
    alone = [one | {"comes": 70 * i, "aborted": None} for i, one in enumerate(requests)]
    options = {
        "model": toy, **OPTIONS, "dtype": "float32", "max_num_seqs": 8,
        "max_num_batched_tokens": 4096, "enable_prefix_caching": False, "env": named(known),
    }  # fmt: skip
    mine, _ = answers(start_vllm, requests, spec, options)
    right, _ = answers(start_vllm, alone, spec, options)
    assert sum(one is None for one in mine) == sum(one["aborted"] is not None for one in requests)
    both = zip(requests, right, strict=True)
    assert mine == [None if one["aborted"] is not None else answer for one, answer in both]


def test_sequences_that_are_preempted_and_share_prefixes_leave_all_pages_free(
    start_vllm, toy, known
):
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 192, "kv_cache_memory_bytes": 9 * 40_000}
    options = {"model": toy, **OPTIONS, **small, "env": named(known)}
    found, metrics = answers(start_vllm, random_requests(seed=3), SPEC, options)
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert any(one is not None for one in found)


@pytest.fixture
def redis(start_server, tmp_path):
    server = start_server(tmp_path)
    yield f"redis://:{quote(server.password)}@127.0.0.1:{server.port}"
    server.kill()


@pytest.fixture
def mooncake(start_master):
    master = start_master()
    # Memory that outlives the engines: each of them has left when the next one looks for chunks.
    with open_store(f"{master.url}&segment_size=64MiB"):
        yield master.url
    master.kill()


@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_engines_share_prefixes_of_the_same_calibration_alone(
    request, start_vllm, toy, known, calibrated, store
):
    options = {"model": toy, **OPTIONS, **sharing(request.getfixturevalue(store))}
    prompt = ids(450, seed=2)

    def serve(calibration, saves=False):
        with start_vllm(SPEC, env=named(calibration), **options) as engine:
            found = engine.ask("greedy", prompts=[prompt], tokens=24)
            engine.ask("saved")
            if saves:  # its prefix comes from its own pages
                found = engine.ask("greedy", prompts=[prompt], tokens=24)
            return found, engine.ask("counts")

    right, first = serve(known, saves=True)
    assert first["saved_chunks"] == 3 and first["loaded_tokens"] == 0
    _, other = serve(calibrated(toy, seed=1))
    assert other["loaded_tokens"] == 0 and other["misses"] > 0 and other["damaged"] == 0
    found, same = serve(known)
    assert same["loaded_tokens"] == 3 * 128
    assert found == right


@pytest.mark.parametrize(
    ("spec", "heads"), [(SPEC, 2), (ALONE, 2), ("turboquant:bits=4,sinks=0", 2), (SPEC, 1)]
)
def test_two_ranks_give_the_log_probabilities_of_one(run_vllm, make_toy, calibrated, spec, heads):
    """Each rank has one of two heads; over the other one's states the numbers would be others.

    Ranks that share one head, because the model has no more, hold all of its states.
    """
    learns = spec != "turboquant:bits=4,sinks=0"
    known = calibrated(toy := make_toy(num_key_value_heads=heads))
    options = {
        "model": toy, **OPTIONS, "dtype": "float32", "max_num_batched_tokens": 64,
        "forced": [ids(450, seed=2)], "env": named(known) if learns else {},
    }  # fmt: skip
    one = run_vllm(spec, **options)
    two = run_vllm(spec, tensor_parallel_size=2, processes=True, **options)
    right, found = (torch.tensor(answer["forced"][0]) for answer in (one, two))
    error = (found - right).abs()
    print(
        f"{spec}: {float(error.median()):.2e} nats in the median, {float(error.max()):.2e} at most"
    )
    assert float(error.median()) < 1e-4
    if learns and heads == 2:
        options["env"] = named(swapped(known))
        other = torch.tensor(run_vllm(spec, **options)["forced"][0])
        assert float((other - right).abs().median()) > 1e-3


def test_two_ranks_share_prefixes_of_the_same_calibration_alone(
    run_vllm, toy, known, calibrated, tmp_path
):
    options = {"model": toy, **OPTIONS, **sharing(tmp_path / "store")}
    requests = [[[ids(450, seed=3)], 16]]

    def serve(calibration, greedy):
        two = {"tensor_parallel_size": 2, "processes": True, "env": named(calibration)}
        answer = run_vllm(SPEC, greedy=greedy, **two, **options)
        return answer["greedy"][-1], answer["metrics"]["vllm:kvpact_loaded_tokens"]

    # What the first engine answers at last comes from its own pages.
    right, loaded = serve(known, requests * 2)
    assert loaded == 0
    assert serve(calibrated(toy, seed=1), requests)[1] == 0
    assert serve(known, requests) == (right, 2 * 3 * 128)


def swapped(path):
    """A calibration of the heads in reverse order; its path."""

    def turned(states):
        return {name: {part: x.flip(0) for part, x in one.items()} for name, one in states.items()}

    held = Calibration.load(path)
    layers = {i: replace(one, k=turned(one.k)) for i, one in held.layers.items()}
    Calibration(layers).save(other := path.with_name("swapped.kvcal"))
    return other


@pytest.mark.parametrize(("spec", "change", "reason"), [
    (SPEC, "gone", "can't be read"),
    ("turboquant:bits=4,sinks=0", "", "learns nothing"),
    (f"{SPEC},first=false", "", "packs 64 tokens together"),
    ("trellis:bits=4,weights=false,sinks=0", "", "run kvpact calibrate with --spec"),
    (SPEC, "heads", "it was made of another model"),
    (SPEC, "layers", "the model has 2: it was made of another model"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_when_vllm_starts(
    run_vllm, toy, known, tmp_path, spec, change, reason
):
    path, held = tmp_path / "other.kvcal", Calibration.load(known)
    if change == "layers":
        held = Calibration({**held.layers, 2: held.layers[0]})
    if change == "heads":
        held = Calibration({i: replace(x, heads=3) for i, x in held.layers.items()})
    if change != "gone":
        held.save(path)
    answer = run_vllm(spec, env=named(path), fails=True, model=toy, **OPTIONS)
    assert reason in answer["log"]
