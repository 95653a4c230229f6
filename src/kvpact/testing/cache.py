"""`CacheContract`: the checks that every cache passes, with those of its attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from kvpact.contract import AttendConfig, Dequantized, Fused
from kvpact.errors import StaleResult
from kvpact.testing.cache_append import AppendChecks, ByteChecks, ExactChecks
from kvpact.testing.cache_base import CacheKit, Tokens
from kvpact.testing.cache_changes import ForkChecks, RollbackChecks, RowChecks, SnapshotChecks
from kvpact.testing.cache_input import InputChecks
from kvpact.testing.data import Shape, by_name, floats, integers, random_tokens
from kvpact.testing.depends import depends_on
from kvpact.testing.held import difference
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


T = TypeVar("T")
_STEPS, _NEW = 6, 4
"""Steps of so many tokens: some have room after the exact tokens, others have to make it."""


class Mode(NamedTuple):
    """The settings of torch while a program calls a cache."""

    dtype: torch.dtype = torch.float32
    device: str | None = None  # the default device; None leaves it
    inference: bool = False  # what is called first runs in inference mode

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set that for one call."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with nullcontext() if self.device is None else torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)


class ModeChecks(CacheKit):
    """A cache that is used under such modes: its bytes and its outputs are those without."""

    modes: ClassVar[dict[str, Mode]] = {
        "float64": Mode(torch.float64),
        "float16 on meta": Mode(torch.float16, "meta"),
        "bfloat16": Mode(torch.bfloat16),
        "inference": Mode(inference=True),
    }

    @depends_on("bytes")
    def test_what_a_program_sets_for_torch(self) -> None:
        """A default is for what a program makes itself; models are often loaded under one."""
        windows = [window for _, window in self.exact_tokens()]
        prompt = max(windows) + max(self.units()) + 8
        expected = self._history(Mode(), prompt)
        for name, mode in self.modes.items():
            different = difference(expected, self._history(mode, prompt))
            assert not different, f"{name}: not the same bytes: {different}"

    def _history(self, mode: Mode, prompt: int) -> dict[str, Tensor]:
        """Return the outputs of a small history and the tensors held at its end, by numbers."""
        found, has = dict[str, Tensor](), self.operations.__contains__
        total = prompt + _STEPS * _NEW
        shape = Shape(1, 2, (total,), 32, 32, torch.float32)
        given = self.tokens(shape, total)

        def run(call: Callable[..., T], *args: Any, **named: Any) -> T:
            with mode.set():
                return call(*args, **named)

        def append(cache: Any, start: int, end: int) -> None:
            part = tuple(x[:, :, start:end] for x in given)
            named = by_name(*part)
            output = run(cache.attend, 0, **named) if has("attend") else run(_shown, cache, part)
            found[f"output {len(found)}"] = output

        with torch.inference_mode(mode.inference):
            cache = run(self.make_cache, shape.geometry())
            append(cache, 0, prompt)
            append(cache, prompt, prompt + _NEW)
        with torch.no_grad():
            for start in range(prompt + _NEW, total, _NEW):
                append(cache, start, start + _NEW)
        caches = [cache]
        if has("fork"):
            caches.append(run(cache.fork))
            append(caches[1], 0, _NEW)
            if has("snapshot"):
                run(caches[1].restore, run(cache.snapshot))
        if has("select"):
            run(cache.select, integers(0))
        for one in caches:
            append(one, 0, 1)
            if has("truncate"):
                run(one.truncate, prompt - 5)
            found[f"shown {len(found)}"] = run(_shown, one, self.tokens(shape, 2, seed=1))
            found |= {f"{len(found)} {path}": x for path, x in self.state(one).items()}
        return found


def _shown(cache: Any, tokens: Tokens) -> Tensor:
    """Store tokens and return all that the result shows, as one row of numbers."""
    result = cache.prefill(0, *tokens, None)
    shown = [x for x in (result.k, result.v, result.logit_bias) if x is not None]
    return torch.cat([x.flatten() for x in shown])


class CacheContract(
    AppendChecks,
    ExactChecks,
    RollbackChecks,
    ForkChecks,
    RowChecks,
    SnapshotChecks,
    ByteChecks,
    AttentionChecks,
    InputChecks,
    ModeChecks,
):
    """Inherit this in a test module; pytest does the rest.

    To test a method inside kvpact's own cache, set `spec`. To test a cache of one's own, override
    `make_cache` (and `exact_tokens` and `groups`, if `spec` doesn't say them).

    Attributes
    ----------
    spec : str
        The spec that `make_cache` makes a cache of.
    operations : tuple of str
        Calls of `EngineCache` besides those of `CompressedKVCache`. Leave out what the cache lacks,
        and the checks that need it are skipped.

    Notes
    -----
    A conforming cache stores the same bytes however tokens are cut into pieces; after a rollback
    is as if the tokens had never come; is independent of its forks; rearranges rows without
    touching them; counts every byte that can be reached from it; attends exactly over what
    `prefill` shows; and after a named error is, byte by byte, as before.
    """
