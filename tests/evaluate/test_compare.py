"""Paired differences, summaries over models and texts, bytes that are compressed."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import FalconH1Config, FalconH1ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from kvpact.evaluate import EvalResult, TokenScores, differences, evaluate, summarize, write_report
from kvpact.evaluate.base import EvalProtocol, EvalRow, EvaluationError

COUNT = 400


def result_of(scores, model="tiny", text="book.txt"):
    """An evaluation of the exact cache and the given KLs by spec, with their means."""
    rows, parts = [], []
    for spec, kl in {"none": np.zeros(COUNT), **scores}.items():
        nll = torch.from_numpy(2 + 3 * kl)
        same = torch.ones(COUNT, dtype=torch.bool)
        parts.append(TokenScores(torch.full((COUNT,), 2.0).double(), nll, torch.tensor(kl), same))
        error = kl.std(ddof=1) / math.sqrt(COUNT)
        row = EvalRow(spec, 5.0, 1000, 9.0, 0.1, kl.mean(), 0.1, 99.0, 1.0, 4.0, 0.1, 0.1, 0.1, 4,
                      64, False, 2, 0)  # fmt: skip
        rows.append(replace(row, kl_se=error))
    versions = {"kvpact": "0", "torch": "2"}
    protocol = EvalProtocol(500, 64, COUNT, 9.0, model, text, "float32", "cpu", 1, versions, 7)
    return EvalResult(rows, protocol, tuple(parts))


@pytest.fixture
def kls():
    rng = np.random.default_rng(0)
    hard = rng.gamma(0.5, 0.02, COUNT)  # how hard each token is, for every cache
    return {"a": hard * rng.uniform(0.9, 1.1, COUNT), "b": 1.5 * hard, "c": hard.copy()}


# --- paired differences ----------------------------------------------------------------------


def test_differences_equal_numpy_and_are_sharper_than_the_means(kls):
    result = result_of(kls)
    b, c = differences(result)
    assert (b.spec, b.against, c.spec) == ("b", "a", "c")
    paired = kls["b"] - kls["a"]
    assert b.kl_difference == pytest.approx(paired.mean(), rel=1e-12)
    assert b.kl_difference_se == pytest.approx(paired.std(ddof=1) / 20, rel=1e-12)
    assert b.kl_ratio == pytest.approx(kls["b"].mean() / kls["a"].mean(), rel=1e-12)
    assert b.nll_difference == pytest.approx(3 * paired.mean(), rel=1e-9)
    assert b.nll_difference_se == pytest.approx(3 * paired.std(ddof=1) / 20, rel=1e-9)
    assert c.kl_difference_se < result.rows[1].kl_se / 5


def test_any_row_can_be_the_baseline(kls):
    a, b = differences(result_of(kls), "c")
    assert (a.spec, b.spec, b.against) == ("a", "b", "c")
    assert b.kl_ratio == pytest.approx(1.5)
    against_exact = differences(result_of(kls), "none")
    assert [x.spec for x in against_exact] == ["a", "b", "c"]
    assert against_exact[0].kl_difference == pytest.approx(kls["a"].mean())
    assert math.isnan(against_exact[0].kl_ratio)


def test_an_unknown_baseline_is_named_with_those_that_there_are(kls):
    with pytest.raises(EvaluationError, match=r"'d' is not among.*none, a, b, c"):
        differences(result_of(kls), "d")
    assert differences(result_of({})) == []


# --- summary ---------------------------------------------------------------------------------


def test_summary_by_hand(kls):
    half = {"a": kls["a"], "b": kls["b"] / 3, "c": kls["c"]}
    results = [result_of(kls), result_of(half, "other")]
    a, b, _ = summarize(results, "a")
    assert (a.kl_ratio, a.kl_difference, a.better, a.worse) == (1, 0, 0, 0)
    means = kls["b"].mean(), kls["b"].mean() / 3
    assert (b.runs, b.kl_mean, b.kl_max) == (2, pytest.approx(sum(means) / 2), max(means))
    errors = [result.rows[2].kl_se for result in results]
    assert b.kl_mean_se == pytest.approx(math.hypot(*errors) / 2)
    base = kls["a"].mean()
    assert b.kl_ratio == pytest.approx(math.sqrt(means[0] * means[1]) / base)
    assert b.kl_difference == pytest.approx(sum(means) / 2 - base)
    pairs = [differences(result, "a")[0].kl_difference_se for result in results]
    assert b.kl_difference_se == pytest.approx(math.hypot(*pairs) / 2)
    assert (b.better, b.worse) == (1, 1)


def test_a_summary_needs_the_same_specs(kls):
    for results in ([result_of(kls), result_of({"a": kls["a"]})], []):
        with pytest.raises(EvaluationError, match="same specs"):
            summarize(results)
    assert summarize([result_of({}), result_of({})]) == []


def test_report_of_several_runs(kls, tmp_path):
    results = [result_of(kls), result_of(kls, "mod/el", "b c.txt"), result_of(kls)]
    files = write_report(results, tmp_path, against="c")
    assert [path.name for path in files] == [
        "eval.json", "summary.json", "eval.md", "eval-tiny-book.png", "eval-el-b_c.png",
        "eval-tiny-book-3.png", "summary.png",
    ]  # fmt: skip
    rows = json.loads(files[0].read_text("utf-8"))
    assert len(rows) == 12
    assert [row["model"] for row in rows[::4]] == ["tiny", "mod/el", "tiny"]
    for key, value in {"text": "book.txt", "tokens": 500, "seed": 7, "against": "c"}.items():
        assert rows[1][key] == value
    assert rows[1]["versions"] == {"kvpact": "0", "torch": "2"}
    assert rows[1]["kl_difference"] == pytest.approx((kls["a"] - kls["c"]).mean())
    assert "kl_difference" not in rows[3]
    summary = json.loads(files[1].read_text("utf-8"))
    assert [row["spec"] for row in summary] == ["a", "b", "c"]
    text = files[2].read_text("utf-8")
    for words in ("## 3 runs", "## mod/el on b c.txt", "less `c`", "3 of 3", "1.500"):
        assert words in text
    with Image.open(files[-1]) as image:
        image.load()
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_a_report_with_a_wrong_baseline_writes_nothing(kls, tmp_path):
    for runs in (result_of(kls), [result_of(kls)] * 2):
        with pytest.raises(EvaluationError, match="not among"):
            write_report(runs, tmp_path / "out", against="d")
    assert not (tmp_path / "out").exists()


# --- coverage --------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def test_sliding_windows_are_not_compressed_and_counted_so():
    torch.manual_seed(0)
    types = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(**SMALL, num_hidden_layers=4, sliding_window=16, layer_types=types)
    model = Gemma3ForCausalLM(config).eval()
    ids = torch.randint(0, 64, (150,), generator=torch.Generator().manual_seed(1))
    specs = ["none", "int:bits=4", "int:bits=4/none"]
    none, coded, half = evaluate(model, ids, specs, chunk=32).rows
    token = 2 * 32 * 4  # K and V of one head, fp32
    native = 3 * 15 * token  # a window of 16 keeps 15 tokens
    for row, covered in ((none, 0), (coded, 150 * token), (half, 75 * token)):
        assert row.exact_bytes == 150 * token + native
        assert (row.native_bytes, row.covered_bytes) == (native, covered)
    text = _protocol([none, coded])
    assert "Coverage: 76.9 % of the exact cache's 0.05 MB" in text
    assert "3 layers are no full attention and stay exact, 0.01 MB" in text
    assert "Coverage" not in _protocol([none])


def _protocol(rows):
    from kvpact.evaluate.report import protocol_text

    return protocol_text(result_of({}).protocol, rows)


def test_states_of_linear_attention_are_counted_beside_keys_and_values():
    torch.manual_seed(0)
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}
    config = FalconH1Config(**SMALL, **mamba, num_hidden_layers=2, mamba_n_groups=1)
    model = FalconH1ForCausalLM(config).eval()
    ids = torch.randint(0, 64, (100,), generator=torch.Generator().manual_seed(1))
    _, coded = evaluate(model, ids, ["none", "int:bits=4"], chunk=32).rows
    states = 4 * (2 * 16 * 8 + (32 + 2 * 8) * config.mamba_d_conv)  # recurrent, convolution
    assert coded.covered_bytes == 2 * 2 * 100 * 32 * 4 and coded.native_bytes == 2 * states
    assert coded.exact_bytes == coded.covered_bytes + coded.native_bytes
    assert "other states stay exact" in _protocol([coded])
