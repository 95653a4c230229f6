"""Checks of the attention: what `attend` returns is attention over what `prefill` shows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpact.contract import AttendConfig, Dequantized, Fused
from kvpact.errors import StaleResult
from kvpact.testing.cache_base import CacheKit, Tokens
from kvpact.testing.data import Shape, by_name, floats, integers, random_tokens
from kvpact.testing.reference import reference_attention

ROWS, HEADS, NEW, HELD = 2, 2, 5, 131
SHAPE = Shape(ROWS, HEADS, (66, 1, 64), 32, 48, torch.float32)
_TOTAL = HELD + NEW
_SEEN = random_tokens(ROWS, 1, NEW, _TOTAL, seed=3) < 0
_PADDING = integers(0, 7)
CONFIGS = {
    "none": None,
    "scale": AttendConfig(softmax_scale=0.3, n_kv_groups=2),
    "softcap": AttendConfig(softcap=2.0),
    "sliding window": AttendConfig(sliding_window=40),
    "a narrow sliding window": AttendConfig(sliding_window=1),
    "sink logits": AttendConfig(sink_logits=floats(0.0, 1.0, -1.0, 3.0)),
    "boolean mask": AttendConfig(mask=_SEEN),
    "mask alone": AttendConfig(mask=_SEEN, is_causal=False),
    "mask per head": AttendConfig(mask=_SEEN.expand(-1, 2 * HEADS, -1, -1)),
    "nothing seen": AttendConfig(mask=torch.zeros(1, 1, 1, _TOTAL, dtype=torch.bool, device="cpu")),
    "additive mask": AttendConfig(mask=random_tokens(1, 1, NEW, _TOTAL)),
    "lowest numbers": AttendConfig(
        mask=floats(0.0).expand(_SEEN.shape).masked_fill(~_SEEN, torch.finfo(torch.float32).min)
    ),
    "not causal": AttendConfig(is_causal=False),
    "padding": AttendConfig(padding=_PADDING),
    "all at once": AttendConfig(
        softmax_scale=0.2,
        softcap=5.0,
        sliding_window=90,
        sink_logits=floats(0.0, 0.0, 0.0, 0.0),
        mask=_SEEN,
        padding=_PADDING,
    ),
    "as stored": AttendConfig(exact_new=False),
}


class AttentionChecks(CacheKit):
    """`attend` and `decode` against attention written out."""

    def _expected(self, cache: Any, tokens: Tokens, config: AttendConfig | None) -> Tensor:
        result = cache.fork().prefill(0, *tokens, config)
        return reference_attention(tokens[2], result.k, result.v, config, result.logit_bias)

    @pytest.mark.parametrize("name", CONFIGS)
    def test_attend_is_attention_over_what_is_shown(self, name: str) -> None:
        """Every option of `AttendConfig`, several new tokens."""
        self.needs("attend", "fork")
        config = CONFIGS[name]
        padded = AttendConfig(padding=config.padding) if config is not None else None
        cache = self.filled(SHAPE, config=padded)
        tokens = self.tokens(SHAPE, NEW, seed=1)
        expected = self._expected(cache, tokens, config)
        output = cache.attend(0, **by_name(*tokens), config=config)
        assert output.dtype == tokens[2].dtype
        assert torch.isfinite(output).all()
        torch.testing.assert_close(output.double(), expected, atol=2e-4, rtol=2e-4)
        assert cache.seq_len(0) == HELD + NEW

    @pytest.mark.parametrize("held", [0, 1, 63, 65, 300])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_decode_and_chunks(self, held: int, dtype: torch.dtype) -> None:
        """One token, and a chunk, after any number of tokens; more than one tile of new ones."""
        self.needs("fork")
        shape = Shape(1, 1, (held,), 32, 48, dtype)
        tolerance = 2e-4 if dtype == torch.float32 else 3e-2
        for new in (1, 260):
            cache = self.make_cache(shape.geometry())
            if held:
                self.append(cache, self.tokens(shape, held))
            tokens = self.tokens(shape, new, seed=1, queries=3)
            expected = self._expected(cache, tokens, None)
            if new == 1:
                answer = cache.decode(0, *tokens, AttendConfig())
                assert isinstance(answer, Fused | Dequantized)
                if isinstance(answer, Dequantized):
                    shown = answer.result
                    output = reference_attention(
                        tokens[2], shown.k, shown.v, None, shown.logit_bias
                    ).to(dtype)
                else:
                    output = answer.output
            else:
                self.needs("attend")
                output = cache.attend(0, **by_name(*tokens), config=None)
            assert output.dtype == dtype
            torch.testing.assert_close(
                output.double(), expected, atol=tolerance, rtol=tolerance, check_dtype=False
            )

    @pytest.mark.parametrize("exact_new", [True, False], ids=["exact", "as stored"])
    def test_a_step_attends_like_attend(self, exact_new: bool) -> None:
        """`store` and then `Step.attend`: the bytes and, to rounding, the output of `attend`."""
        self.needs("attend", "store")
        config = AttendConfig(exact_new=exact_new, softmax_scale=0.2)
        caches = [self.make_cache(SHAPE.geometry()) for _ in range(2)]
        for seed, new in enumerate((70, 1, 64)):
            k, v, q = self.tokens(SHAPE, new, seed)
            wanted = caches[0].attend(0, k=k, v=v, q=q, config=config)
            output = caches[1].store(0, k=k, v=v, config=config).attend(q, config)
            torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
            self.assert_same(*caches)

    def test_a_step_from_before_is_stale(self) -> None:
        """A step does not attend over tokens that are no longer there."""
        self.needs("store", "truncate")
        cache = self.filled(SHAPE)
        k, v, q = self.tokens(SHAPE, NEW, seed=1)
        step = cache.store(0, k=k, v=v)
        cache.truncate(40)
        with pytest.raises(StaleResult):
            step.attend(q, AttendConfig())

    def test_bias_follows_the_scale(self) -> None:
        """A `logit_bias` is in units of the scaled logits, and zero where K is exact."""
        self.needs("fork")
        cache = self.filled(SHAPE)
        tokens = self.tokens(SHAPE, NEW, seed=1)
        results = [
            cache.fork().prefill(0, *tokens, AttendConfig(softmax_scale=scale))
            for scale in (1.0, 0.25)
        ]
        if results[0].logit_bias is None:
            assert results[1].logit_bias is None
            return
        full, quarter = (result.logit_bias for result in results)
        assert full.shape == (ROWS, 2 * HEADS, NEW, HELD + NEW)
        torch.testing.assert_close(full * 0.25, quarter, atol=1e-6, rtol=1e-5)
        assert not full[..., HELD:].any()
        assert bool(full.any())

    def test_rows_of_padding_only_are_finite(self) -> None:
        """A row that has seen nothing but padding gets zeros, not NaN."""
        self.needs("attend")
        cache = self.make_cache(SHAPE.geometry())
        config = AttendConfig(padding=integers(0, 9))
        output = cache.attend(0, **by_name(*self.tokens(SHAPE, 6)), config=config)
        assert torch.isfinite(output).all()
        assert not output[1].any()
