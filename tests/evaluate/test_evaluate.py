"""Metrics against oracles, the chunked protocol on a tiny model, the report's files."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import log_softmax, rel_entr
from tiny_llama import tiny_llama
from transformers import DynamicCache

import kvpact
from kvpact.errors import KVPactError, SpecError
from kvpact.evaluate import evaluate, evaluate_text, markdown_table, save_plot, write_report
from kvpact.evaluate.base import Candidate, EvalProtocol, EvalRow, EvaluationError, row_name
from kvpact.evaluate.metrics import MetricAccumulator, TokenScores, score_tokens
from kvpact.evaluate.report import protocol_text
from kvpact.evaluate.result import EvalResult

FIELDS = [
    "spec", "bits_per_value", "bytes", "perplexity", "perplexity_change", "kl_mean", "kl_p99",
    "top1", "seconds",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_llama(512)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 128, (300,), generator=torch.Generator().manual_seed(1))


def logits_of(seed, rows=70, vocab=97, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocab, generator=generator)


# --- metrics ---------------------------------------------------------------------------------


def test_scores_equal_scipy_over_several_row_blocks():
    ref, logits = logits_of(0), logits_of(1)
    targets = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(2))
    scores = score_tokens(ref, logits, targets)
    log_p, log_q = (log_softmax(x.double().numpy(), axis=-1) for x in (ref, logits))
    rows = np.arange(70)
    np.testing.assert_allclose(scores.ref_nll, -log_p[rows, targets], rtol=1e-12)
    np.testing.assert_allclose(scores.nll, -log_q[rows, targets], rtol=1e-12)
    kl = rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1)
    np.testing.assert_allclose(scores.kl, kl, rtol=1e-10)
    assert np.array_equal(scores.agree, log_p.argmax(-1) == log_q.argmax(-1))


def test_scores_are_stable_for_huge_logits_and_zero_for_equal_ones():
    ref = logits_of(3, scale=1e4)
    targets = torch.zeros(70, dtype=torch.long)
    assert torch.isfinite(score_tokens(ref, ref.roll(1, 0), targets).kl).all()
    equal = score_tokens(ref, ref.clone(), targets)
    assert equal.kl.max() == 0 and equal.agree.all()


def test_scores_of_no_token_and_of_wrong_shapes():
    empty = score_tokens(torch.zeros(0, 5), torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
    assert len(empty.kl) == 0
    with pytest.raises(ValueError, match="should be"):
        score_tokens(torch.zeros(3, 5), torch.zeros(3, 6), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="should be"):
        score_tokens(torch.zeros(3, 5), torch.zeros(3, 5), torch.zeros(2, dtype=torch.long))


def test_summary_equals_numpy_and_takes_pieces():
    rng = np.random.default_rng(4)
    ref, nll = rng.gamma(2.0, 1.5, 501), rng.gamma(2.0, 1.5, 501)
    kl, agree = rng.gamma(0.5, 0.02, 501), rng.random(501) < 0.9
    metrics = MetricAccumulator()
    for rows in (slice(0, 200), slice(200, 201), slice(201, None)):
        metrics.add(TokenScores(*(torch.tensor(x[rows]) for x in (ref, nll, kl, agree))))
    found = metrics.summary()
    assert len(metrics.scores().kl) == 501
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-12)
    assert found["reference_perplexity"] == pytest.approx(np.exp(ref.mean()), rel=1e-12)
    ratio = np.exp(nll.mean() - ref.mean())
    assert found["perplexity_change"] == pytest.approx(100 * (ratio - 1), rel=1e-10)
    error = (nll - ref).std(ddof=1) / math.sqrt(501)
    assert found["perplexity_change_se"] == pytest.approx(100 * ratio * error, rel=1e-12)
    assert found["kl_mean"] == pytest.approx(kl.mean(), rel=1e-12)
    assert found["kl_median"] == pytest.approx(np.median(kl), rel=1e-12)
    assert found["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-12)
    assert found["kl_max"] == kl.max()
    assert found["top1"] == pytest.approx(100 * agree.mean(), rel=1e-12)


def test_nothing_scored_is_an_error():
    with pytest.raises(ValueError, match="no token"):
        MetricAccumulator().summary()


# --- protocol --------------------------------------------------------------------------------


class Measured(DynamicCache):
    """An exact cache with the figures that the runner asks for."""

    def stats(self):
        total = sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values))
        bits = {"bits_per_value": 32.0, "slot_bits_per_value": 32.0}
        layers = {"compressed": len(self.layers), "native": 0}
        return {**bits, "bytes": {"total": total}, "layers": layers}


class Spoilt(Measured):
    """Exact, but what attention sees of the last layer is spoilt in one forward pass."""

    spoilt_at = 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        before = self.get_seq_length(layer_idx)
        k, v = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        spoilt = layer_idx == 1 and before == self.spoilt_at
        return (k, v.flip(-1)) if spoilt else (k, v)


def run(model, ids, cache_type, chunk=64):
    make = lambda config, _: cache_type(config=config)  # noqa: E731
    return evaluate(model, ids, ["none"], chunk=chunk, make_cache=make)


def test_an_exact_cache_has_no_kl_and_the_perplexity_of_one_forward(model, ids):
    result = run(model, ids, Measured)
    (row,) = result.rows
    assert row.kl_max <= 1e-9 and row.top1 == 100
    assert row.perplexity_change == pytest.approx(0, abs=1e-6)
    # Logits 64 to 298 predict tokens 65 to 299: 235 tokens, the first chunk left out.
    with torch.inference_mode():
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
    nll = -log_p[64:299].gather(-1, ids[65:, None])
    assert result.protocol.scored == (result.protocol.tokens - 1 - result.protocol.chunk) == 235
    assert row.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)
    assert result.protocol.reference_perplexity == pytest.approx(row.perplexity, rel=1e-9)
    assert row.bytes == 2 * 2 * 2 * 300 * 32 * 4


def test_the_first_chunk_is_left_out_of_every_metric(model, ids):
    (first,) = run(model, ids, Spoilt).rows
    assert first.kl_max <= 1e-9 and first.top1 == 100

    class SpoiltLater(Spoilt):
        spoilt_at = 64

    (later,) = run(model, ids, SpoiltLater).rows
    assert later.kl_mean > 0.01 and later.top1 < 100


@pytest.mark.parametrize(("tokens", "scored"), [(66, 1), (128, 63), (129, 64), (130, 65)])
def test_targets_cross_chunk_borders_and_the_last_token_has_none(model, ids, tokens, scored):
    result = run(model, ids[:tokens], Measured)
    assert result.protocol.scored == scored
    with torch.inference_mode():
        log_p = model(ids[None, :tokens]).logits[0].double().log_softmax(-1)
    nll = -log_p[64 : tokens - 1].gather(-1, ids[65:tokens, None])
    assert result.rows[0].perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)
    assert math.isnan(result.rows[0].perplexity_change_se) == (scored == 1)


def test_rows_steps_and_bytes_of_real_caches(model, ids):
    steps = []
    specs = ["int:bits=8", "int:bits=2"]
    result = evaluate(model, ids, specs, chunk=64, progress=lambda *step: steps.append(step))
    none, fine, coarse = result.rows
    assert [row.spec for row in result.rows] == ["none", *specs]
    assert none.kl_max <= 1e-9 and none.top1 == 100 and none.slot_bits_per_value == 32
    assert 0 < fine.kl_mean < coarse.kl_mean / 10
    assert (fine.slot_bits_per_value, coarse.slot_bits_per_value) == (8.5, 2.5)
    assert (fine.sinks, fine.window, none.sinks, none.window) == (4, 64, 0, 0)
    for row in result.rows:
        assert row.bits_per_value == row.bytes * 8 / (2 * 2 * 2 * 32 * 300)
        assert (row.layers_compressed, row.layers_native) == (2, 0)
        assert row.seconds > 0 and not row.packed_only
    assert [done for done, _, _ in steps] == list(range(1, 21))
    assert {total for _, total, _ in steps} == {20}
    assert [what for *_, what in steps[:4]] == ["exact reference", "none", *specs]


def test_packed_only_attends_to_packed_slots_alone(model, ids):
    bare = Candidate("int:bits=3,sinks=0,window=0", exact_new=True)
    candidates = [bare, Candidate("int:bits=3", packed_only=True)]
    _, bare, packed = evaluate(model, ids, candidates, chunk=64).rows
    assert (packed.sinks, packed.window, packed.packed_only) == (0, 0, True)
    assert packed.bytes == bare.bytes
    assert packed.kl_mean > bare.kl_mean  # new tokens come as stored, too


def test_a_spec_without_a_window_is_measured_as_decoding_reads(model, ids):
    """In chunks it is about as in single steps, not better because its own tokens are exact."""
    spec, windowed = "int:bits=3,sinks=0,window=0", "int:bits=3"
    flattered = Candidate(spec, exact_new=True)
    none, row, exact, other = evaluate(model, ids, [spec, flattered, windowed], chunk=64).rows
    steps = evaluate(model, ids, [spec, windowed], chunk=1).rows[1:]
    assert [x.exact_new for x in (none, row, exact, other, *steps)] == [1, 0, 1, 1, 1, 1]
    assert exact.kl_mean < row.kl_mean / 1.2
    assert row.kl_mean == pytest.approx(steps[0].kl_mean, rel=0.5) and row.bytes == exact.bytes
    assert row_name(row) == f"{spec} (new as stored)" and row_name(exact) == spec
    result = evaluate(model, ids, [spec], chunk=64)
    assert "(new as stored)" in repr(result)
    assert "new as stored" in protocol_text(result.protocol, result.rows)


def test_only_specs_without_any_window_read_a_chunk_as_stored():
    mixed = {"default": "int:bits=4,window=0", "layers": {"0": "none", "1": "fp8"}}
    bare = {"default": "int:bits=4,window=0", "layers": {"0": "none"}}
    found = [
        Candidate(x, packed_only=only).as_decoded(3, chunk).exact_new
        for x, only, chunk in (
            ("none", False, 64), ("fp8", False, 64), (mixed, False, 64), (bare, False, 64),
            (bare, False, 1), ("fp8", True, 64),
        )
    ]  # fmt: skip
    assert found == [True, True, True, False, True, False]
    assert Candidate(bare, exact_new=True).as_decoded(3, 64).exact_new


def test_packed_only_spec_for_a_recipe():
    recipe = {"default": "int:bits=4", "layers": {"0": "fp8"}}
    stripped = Candidate(recipe, packed_only=True).layers(2)
    assert list(map(str, stripped)) == ["fp8:sinks=0,window=0", "int:bits=4,sinks=0,window=0"]


def test_a_recipe_is_evaluated_under_its_file_name(model, ids, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('default = "int:bits=4"\n[layers]\n0 = "fp8"\n', encoding="utf-8")
    none, row = evaluate(model, ids, [str(path)], chunk=64).rows
    assert row.spec == "plan.toml" and 4.5 < row.slot_bits_per_value < 8.5
    assert none.spec == "none"


def test_methods_that_learn_stand_beside_the_others(model, ids):
    specs = ["int:bits=4", "turboquant:bits=4", "lowrank:rank=32", "lowrank:rank=8", "vq:dims=2",
             "hybrid:rank=32"]  # fmt: skip
    none, *others = evaluate(model, ids, ["none", *specs], chunk=64).rows
    rows = dict(zip(specs, others, strict=True))
    assert [row.fitted for row in others] == [False, False, True, True, True, True]
    assert none.kl_mean < 1e-9
    assert rows["lowrank:rank=32"].kl_mean < 1e-6  # all of the 32 channels
    assert rows["lowrank:rank=8"].kl_mean > 10 * rows["int:bits=4"].kl_mean
    assert all(0 < rows[spec].kl_mean < 0.1 for spec in ("vq:dims=2", "hybrid:rank=32"))
    # What was learnt is counted: at 300 tokens it outweighs the codes.
    assert rows["vq:dims=2"].bytes > rows["int:bits=4"].bytes


@pytest.mark.parametrize(("tokens", "chunk", "words"), [
    (100, 99, "nothing to score"), (10, 256, "longer text"), (300, 0, "chunk 0"),
    (300, -1, "1 or more"), (513, 64, "at most 512"),
])  # fmt: skip
def test_sizes_that_allow_no_evaluation(model, tokens, chunk, words):
    ids = torch.zeros(tokens, dtype=torch.long)
    with pytest.raises(EvaluationError, match=words) as caught:
        evaluate(model, ids, ["none"], chunk=chunk)
    assert isinstance(caught.value, KVPactError) and "\n" not in str(caught.value)


def test_a_bad_spec_is_told_before_anything_runs(model, ids):
    steps = []
    with pytest.raises(SpecError):
        evaluate(model, ids, ["int:bit=4"], progress=lambda *step: steps.append(step))
    assert not steps


def test_text_is_cut_to_the_tokens_asked_for(model):
    def tokenizer(text, truncation, max_length):
        assert truncation
        return {"input_ids": [ord(c) for c in text][:max_length]}

    options = {"tokenizer": tokenizer, "tokens": 200, "chunk": 64}
    result = evaluate_text(model, ["none"], "abcdefgh" * 40, **options)
    assert result.protocol.tokens == 200
    short = kvpact.evaluate(model, "none", "abcdefgh" * 10, **options)
    assert short.protocol.tokens == 80
    with pytest.raises(EvaluationError, match="longer text"):
        evaluate_text(model, ["none"], "abc", **options)
    with pytest.raises(KVPactError, match="give its tokenizer="):
        kvpact.evaluate(model, "none", "abcdefgh" * 40)
    assert repr(result).startswith("none: exact, KL ")
    assert repr(result).endswith(" 100.0 % of an exact 16-bit cache")
    assert repr(result).isascii() and " +- " in repr(result)


# --- report ----------------------------------------------------------------------------------


def row(spec, bits, kl, packed_only=False):
    return EvalRow(
        spec, bits, 1_500_000, 12.5, 0.4, kl, 8 * kl, 98.0, 1.5, bits, kl / 2, 20 * kl, 0.1, 4, 64,
        packed_only, 30, 0, share=bits / 16,
    )  # fmt: skip


def report(rows):
    versions = {"kvpact": "0.1.0", "torch": "2"}
    sizes, place = (2048, 256, 1791, 12.45), ("tiny", "book.txt", "float32", "cpu", 2)
    return EvalResult(rows, EvalProtocol(*sizes, *place, versions))


def test_report_files(tmp_path):
    rows = [row("none", 32.0, 0.0), row("fp8", 9.0, 2e-4), row("int:bits=2", 3.0, 0.1, True)]
    files = write_report(report(rows), tmp_path / "new" / "folder")
    assert [path.name for path in files] == ["eval.json", "eval.md", "eval.png"]
    data = json.loads(files[0].read_text("utf-8"))
    assert [list(entry)[: len(FIELDS)] for entry in data] == [FIELDS] * 3
    assert data[1]["kl_mean"] == 2e-4 and data[2]["packed_only"] is True
    text = files[1].read_text("utf-8")
    for words in ("chunks of 256", "2048 tokens of book.txt", "torch 2", "first chunk left out"):
        assert words in text
    assert markdown_table(rows) in text and "`int:bits=2` (packed only)" in text


def test_json_has_null_for_what_is_no_number(tmp_path):
    files = write_report(report([row("none", 32.0, math.nan)]), tmp_path)

    def refuse(word):
        raise AssertionError(word)

    (entry,) = json.loads(files[0].read_text("utf-8"), parse_constant=refuse)
    assert entry["kl_mean"] is None


@pytest.mark.parametrize("count", [0, 1, 24])
def test_plot_is_a_picture_whatever_there_is_to_draw(tmp_path, count):
    rows = [row("none", 32.0, 0.0)]
    rows += [row(f"turboquant:bits={i}", 3 + i % 5, 0.1 / (1 + i % 4), i % 2) for i in range(count)]
    save_plot(rows, tmp_path / "plot.png", title="a title")
    with Image.open(tmp_path / "plot.png") as image:
        image.load()
        assert image.format == "PNG" and image.size == (1500, 960)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
