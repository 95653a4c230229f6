"""`BackendContract`: a backend computes what the torch bodies compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from kvpact.cache import create_cache
from kvpact.contract import AttendConfig
from kvpact.geometry import CacheGeometry
from kvpact.kernels.base import OPERATIONS, AttendCall, Backend, Operation
from kvpact.kernels.sources import ListSource, Segment, SegmentSource
from kvpact.kernels.torch.backend import TORCH
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.methods.fitted import FittedCodec
from kvpact.testing.data import floats, integers, random_offset, random_tokens
from kvpact.testing.held import same_bytes
from kvpact.testing.method_base import both_sides, new_codec
from kvpact.testing.specs import example_specs, variant_specs

ROWS, HEADS, SEGMENT = 2, 3, 128
GUARD = 64
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (20, 33, 64, 80)
_PADDING = integers(0, 7)
CALLS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    # Tokens held, new tokens, query heads per KV head, rules.
    "one token": (300, 1, 3, {}),
    "a short past": (1, 1, 1, {}),
    "a chunk": (333, 40, 2, {"softmax_scale": 0.3}),
    "softcap": (129, 5, 5, {"softcap": 2.0}),
    "a sliding window": (200, 70, 1, {"sliding_window": 33}),
    "sinks": (65, 1, 2, {"sink_logits": floats(*(-1 + i for i in range(2 * HEADS)))}),
    "padding": (150, 3, 4, {"padding": _PADDING}),
    "not causal": (97, 9, 2, {"is_causal": False}),
    "nothing seen": (64, 1, 2, {"mask": torch.zeros(1, 1, 1, 65, dtype=torch.bool, device="cpu")}),
    "an additive mask": (90, 2, 2, {"mask": (floats(*range(92)) / 23 - 3).expand(1, 1, 2, 92)}),
}


def _specs() -> list[str]:
    """Return every spec; asked for when tests are collected, since it looks all methods up."""
    return [*(example_specs() | variant_specs())]


def _learns(spec: str) -> bool:
    return any(new_codec(spec, side, 64, torch.float32).learns_from for side in ("key", "value"))


def whole_levels(codec: Codec) -> bool:
    """Return whether levels are whole numbers of 8 bits, so that backends may round q to 16."""
    form = codec.form
    return form is not None and (form.trellis is not None or form.unit > 0)


class _Slots(NamedTuple):
    codec: Codec
    source: SegmentSource


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill new, uninitialised tensors with NaN, so that what is not written is seen."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn)


class BackendContract:
    """Inherit this in a test module and return your backend from `make_backend`.

    What a backend covers is compared with `kvpact.kernels.torch`, which defines the results:
    encoded slots and decoded numbers to the bit, attention by the norm of the difference. What it
    does not cover is skipped with the backend's own reason.

    Attributes
    ----------
    max_error, max_error_whole : float
        `|output - torch's| / |torch's|` of attention in fp32 stays below it; the other one where
        levels are whole numbers of 8 bits.
    device : str
        Where the backend is tested.
    """

    max_error: ClassVar[float] = 1e-6
    max_error_whole: ClassVar[float] = 5e-4
    device: ClassVar[str] = "cpu"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give checks that name no specs of their own those of all registered methods."""
        own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
        if "spec" in metafunc.fixturenames and "spec" not in own:
            learning = metafunc.function.__name__ == "test_what_codecs_learn"
            metafunc.parametrize("spec", [s for s in _specs() if not learning or _learns(s)])

    def make_backend(self) -> Backend:
        """Return the backend."""
        raise NotImplementedError

    def _backend(self) -> Backend:
        backend = self.make_backend()
        if reason := backend.runs_here(torch.device(self.device)):
            pytest.skip(reason)
        return backend

    def _codec(
        self, spec: str, side: str, dim: int, dtype: torch.dtype, fitted: bool = True
    ) -> Codec:
        codec = new_codec(spec, side, dim, dtype)
        if fitted and isinstance(codec, FittedCodec):
            x = random_tokens(ROWS, HEADS, 256, dim, seed=7)
            codec = codec.fit(x.to(self.device, dtype))
        return codec

    def _covered(self, operation: Operation, codec: Codec, dtype: torch.dtype) -> Backend:
        backend = self._backend()
        if reason := backend.covers(operation, codec, dtype):
            pytest.skip(f"{operation}: {reason}")
        return backend

    def _guarded(self, codec: Codec) -> tuple[Segment, list[Tensor]]:
        """Return a segment of zeros, and the memory that it lies in with guards on both sides."""
        segment, memory = {}, []
        tokens = max(SEGMENT, codec.group)
        for field in codec.fields:
            like = field.allocate(ROWS, HEADS, tokens, torch.device(self.device))
            whole = like.new_full((like.numel() + 2 * GUARD,), 85)
            segment[field.name] = whole[GUARD:-GUARD].view(like.shape).zero_()
            memory.append(whole)
        return segment, memory

    def _slots(
        self, backend: Backend, codec: Codec, x: Tensor, pieces: tuple[int, ...]
    ) -> list[Segment]:
        """Return the segments after pieces of tokens were written to them in turn."""
        made = [self._guarded(codec) for _ in range(-(-x.shape[2] // SEGMENT))]
        segments, start = [segment for segment, _ in made], 0
        encoder = backend.encoder(codec)
        for piece in torch.split(x, list(pieces), 2):
            end = start + piece.shape[2]
            first, last = start // SEGMENT, -(-end // SEGMENT)
            prepared = encoder.prepare(piece)
            source = ListSource(tuple(segments[first:last]), SEGMENT)
            encoder.write(prepared, source, start - first * SEGMENT)
            start = end
        for whole in (whole for _, memory in made for whole in memory):
            guards = torch.cat([whole[:GUARD], whole[-GUARD:]])
            assert bool((guards == whole.new_full((), 85)).all()), "guards overwritten"
        return segments

    def test_it_says_what_it_covers(self) -> None:
        """A name, and for every operation and method the reason why not, or nothing."""
        backend = self._backend()
        assert backend.name and backend.describe()
        for spec in _specs():
            codec = self._codec(spec, "key", 64, torch.float32)
            for operation in OPERATIONS:
                reason = backend.covers(operation, codec, torch.float32)
                assert isinstance(reason, str)

    @both_sides()
    def test_encoded_bytes(self, spec: str, side: str) -> None:
        """The slots of the torch body, whatever the pieces; nothing is written outside of them."""
        for dim, dtype in zip(WIDTHS, (*DTYPES, torch.float32), strict=True):
            codec = self._codec(spec, side, dim, dtype)
            backend = self._covered("encode", codec, dtype)
            group = codec.group
            pieces = (group, 2 * group, 5 * group) if group > 1 else (1, 36, 129, 1)
            x = random_tokens(ROWS, HEADS, sum(pieces), dim, seed=dim, dtype=dtype, offset=1.0)
            x = x.to(self.device)
            expected = self._slots(TORCH, codec, x, (x.shape[2],))
            for wanted, found in zip(expected, self._slots(backend, codec, x, pieces), strict=True):
                assert all(same_bytes(wanted[name], found[name]) for name in wanted)

    @both_sides()
    def test_what_codecs_learn(self, spec: str, side: str) -> None:
        """The state that the torch body learns, of rows with padding and without queries."""
        for dim, dtype in zip((64, 80, 128), DTYPES, strict=True):
            codec = self._codec(spec, side, dim, dtype, fitted=False)
            if not codec.learns_from:
                pytest.skip(f"{type(codec).__name__} learns from no first tokens")
            backend = self._covered("learn", codec, dtype)
            x = random_tokens(
                ROWS, HEADS, codec.learns_from, dim, seed=dim, dtype=dtype, offset=1.0
            )
            energy = random_tokens(1, 1, HEADS, dim, seed=dim + 1)[0, 0].square().to(self.device)
            for context in (Context(_PADDING, 4, energy), Context()):
                expected = TORCH.learn(codec, x.to(self.device), context).state()
                with unwritten_is_nan():
                    found = backend.learn(codec, x.to(self.device), context).state()
                assert list(expected) == list(found)
                assert all(same_bytes(expected[name], found[name]) for name in expected)

    @both_sides()
    def test_decoded_numbers(self, spec: str, side: str) -> None:
        """The numbers of the torch body for any part, into memory with gaps."""
        for dim, dtype in zip(WIDTHS, (*DTYPES, torch.float32), strict=True):
            codec = self._codec(spec, side, dim, dtype)
            backend = self._covered("decode", codec, dtype)
            count = -(-200 // codec.group) * codec.group
            x = random_tokens(ROWS, HEADS, count, dim, seed=dim, dtype=dtype).to(self.device)
            slots = _Slots(
                codec, ListSource(tuple(self._slots(TORCH, codec, x, (count,))), SEGMENT)
            )
            for start, end in ((0, 1), (37, 38), (30, 33), (5, 150), (0, count)):
                for inverse in (True, False):
                    expected = self._decoded(TORCH, slots, start, end, dim, dtype, inverse)
                    found = self._decoded(backend, slots, start, end, dim, dtype, inverse)
                    assert same_bytes(expected, found), (dim, dtype, start, end, inverse)

    def _decoded(
        self,
        backend: Backend,
        slots: _Slots,
        start: int,
        end: int,
        dim: int,
        dtype: torch.dtype,
        inverse: bool,
    ) -> Tensor:
        count = end - start
        shape = (ROWS + 1, HEADS + 1, count + 2, dim + 3)
        whole = torch.full(shape, 85.0, dtype=dtype, device=self.device)
        out = whole[:ROWS, :HEADS, 1 : 1 + count, 1 : 1 + dim]
        out.fill_(torch.nan)
        backend.decode(slots, start, end, out, inverse=inverse)
        found = out.clone()
        out.fill_(85.0)
        assert bool((whole == 85.0).all()), "guards overwritten"
        return found

    def _call(
        self,
        spec: str,
        name: str,
        dim: int,
        dtype: torch.dtype,
        seed: int = 0,
        more: int = 0,
        offset: bool = False,
    ) -> AttendCall:
        """Return a call of attention over a cache that the torch bodies filled."""
        held, new, groups, rules = CALLS[name]
        held += more
        v_dim, padding = dim + 16, rules.get("padding")
        geometry = CacheGeometry(1, HEADS, dim, v_dim, dtype)

        def tokens(heads: int, count: int, width: int, side: int) -> Tensor:
            x = random_tokens(ROWS, heads, count, width, seed=10 * seed + side, dtype=dtype)
            return x.to(self.device)

        past = tokens(HEADS, held, dim, 0), tokens(HEADS, held, v_dim, 1)
        offsets = {0: random_offset(HEADS, dim, seed=6)} if offset else None
        cache = create_cache(spec, geometry, backend="torch", key_offsets=offsets)
        cache.prefill(0, *past, config=AttendConfig(padding=padding))
        k, v = tokens(HEADS, new, dim, 2), tokens(HEADS, new, v_dim, 3)
        q, config = tokens(HEADS * groups, new, dim, 4), AttendConfig(**rules)
        # `store` leaves the view of the past, to which the new tokens do not belong.
        step = cache.store(0, k=k, v=v, config=AttendConfig(padding=padding))  # type: ignore[union-attr]
        return AttendCall(step.view, k, v, q, config, step.padding)

    def _compare(self, calls: list[AttendCall]) -> None:
        view = calls[0].view
        assert view is not None
        codecs = view.k.codec, view.v.codec
        for codec in codecs:
            backend = self._covered("attend", codec, calls[0].q.dtype)
        with unwritten_is_nan():
            expected, found = TORCH.attend(calls), backend.attend(calls)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        whole = any(map(whole_levels, codecs))
        limit = self.max_error_whole if whole else self.max_error
        limit = max(limit, 2 * torch.finfo(found.dtype).eps)
        error = (found.double() - expected.double()).norm()
        assert error <= limit * expected.double().norm()

    def test_attention_over_every_method(self, spec: str) -> None:
        """One token and a chunk, at a width that is no power of two."""
        for dim, name in ((64, "one token"), (80, "a chunk")):
            self._compare([self._call(spec, name, dim, torch.float32)])

    @pytest.mark.parametrize("name", CALLS)
    @pytest.mark.parametrize("spec", ["none", "int:bits=4", "kivi:bits=2,group=32"])
    def test_attention_by_every_rule(self, spec: str, name: str) -> None:
        """Scale, softcap, windows, sinks, masks, padding, in every dtype."""
        for dim, dtype in zip((36, 64, 128), DTYPES, strict=True):
            self._compare([self._call(spec, name, dim, dtype)])

    @pytest.mark.parametrize("name", ["one token", "a chunk", "a sliding window", "padding"])
    @pytest.mark.parametrize("spec", ["turboquant:bits=4", "kivi:bits=2,group=32", "fp8"])
    def test_attention_over_keys_without_their_offset(self, spec: str, name: str) -> None:
        """Its logits are added, at each row's own positions; sinks and recent tokens are whole."""
        if reason := self._backend().covers_offset():
            pytest.skip(reason)
        for dim, dtype in ((36, torch.float32), (128, torch.bfloat16)):
            self._compare([self._call(spec, name, dim, dtype, offset=True)])

    @pytest.mark.parametrize("spec", ["turboquant:bits=4", "none", "fp8/int:bits=8"])
    def test_several_calls_at_once(self, spec: str) -> None:
        """Batches of unlike lengths: their outputs come in the order of the calls."""
        calls = [
            self._call(spec, "one token", 64, torch.float32, seed, more)
            for seed, more in enumerate((0, 77, 500))
        ]
        self._compare(calls)
