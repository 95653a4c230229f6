"""Plans: which backend computes what, decided once per stream, and why.

`choose` makes the `Compute` of a cache; a layer's first tokens bring device and codecs, for which
`Compute.plan` asks each backend what it covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.errors import BackendUnavailable
from kvpact.kernels.base import (
    AttendCall,
    Backend,
    Encoder,
    Operation,
    SlotReader,
    StepRunner,
)
from kvpact.kernels.counts import Counts
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.gather import chosen_calls
from kvpact.kernels.prompt import PromptRunner, PromptSide
from kvpact.kernels.torch.attend import attend
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.torch.latent import KeyMaking
from kvpact.kernels.torch.logits import check_call
from kvpact.kernels.torch.slots import TorchEncoder
from kvpact.kernels.triton.backend import TRITON
from kvpact.kernels.views import StreamView
from kvpact.methods import Arrays, Codec
from kvpact.methods.context import Context
from kvpact.quantizers.checks import deferred


class Empty(dict[Any, Any]):
    """Objects shared by layers that begin the same way, by what they are made for."""

    def held_parts(self) -> tuple[()]:
        """Hold no memory (see `kvpact.testing.held_tensors`)."""
        return ()


BACKENDS: tuple[Backend, ...] = (CPU, TRITON, TORCH)
"""In the order in which ``backend="auto"`` tries them. The last one covers everything."""

_AT_ONCE = nullcontext()


class Line(NamedTuple):
    """One line of `report` and of `coverage`."""

    operation: str
    backend: str
    available: bool
    reason: str


class Compute:
    """The backends of one cache: `requested` (``auto`` or a name); `deferred`: as of checks."""

    def __init__(self, requested: str = "auto", deferred: bool = False) -> None:
        self.requested, self.deferred = requested, deferred
        self.counts = Counts()
        self._reasons: dict[tuple[Operation, str], str] = {}
        # Of codecs that learnt nothing, in common to layers.
        self._streams: dict[tuple[Codec, torch.device, torch.dtype], StreamPlan] = {}
        self._plans: dict[tuple[StreamPlan, StreamPlan, bool, bool], Plan] = {}
        self.empty, self.prompts = Empty(), Empty()
        self.layers: dict[object, int] = {}  # of a cache, by spec
        # What stored a layer's first tokens as those of another layer, if that was the last call.
        self.repeats: Any = None

    def end_prompt(self) -> None:
        """Forget what was made for layers of one kind."""
        self.prompts.clear()
        self.repeats = None

    def checking(self) -> AbstractContextManager[list[Tensor] | None]:
        """Return a context for the checks of one call: at once (None), or deferred (flags)."""
        return deferred() if self.deferred else _AT_ONCE

    @property
    def named(self) -> bool:
        """True if one backend was asked for by name."""
        return self.requested != "auto"

    def backend(
        self,
        operation: Operation,
        codecs: Sequence[Codec],
        device: torch.device,
        dtype: torch.dtype,
        offset: bool = False,
        latent: bool = False,
    ) -> tuple[Backend, str]:
        """Return the backend for an operation, and why no better one; `offset`: keys lack one."""
        reasons: list[str] = []
        for backend in BACKENDS:
            if self.named and backend.name != self.requested:
                continue
            if not self.named and backend.kind not in ("", device.type):
                continue
            reason = backend.runs_here(device)
            for codec in codecs:
                reason = reason or backend.covers(operation, codec, dtype)
            if offset:
                reason = reason or backend.covers_offset()
            if latent:
                reason = reason or backend.covers_latents(codecs[0])
            if not reason:
                return backend, "; ".join(reasons)
            reasons.append(f"{backend.name}: {reason}")
        raise BackendUnavailable(
            f"backend {self.requested!r} can't {operation}: {'; '.join(reasons)}; use 'auto'"
        )

    def stream(self, codec: Codec, device: torch.device, dtype: torch.dtype) -> StreamPlan:
        """Return the plan of one stream. Raises `BackendUnavailable`."""
        if codec.state():
            return StreamPlan(self, codec, device, dtype)
        known = codec, device, dtype
        if known not in self._streams:
            self._streams[known] = StreamPlan(self, codec, device, dtype)
        return self._streams[known]

    def plan(
        self, k: StreamPlan, v: StreamPlan, offset: bool = False, latent: bool = False
    ) -> Plan:
        """Return the plan of a layer, with `offset` and `latent` as in `backend`."""
        if k.before is not None:
            return self.plan(k.before, v, offset, latent).after(k)
        known = k, v, offset, latent
        plan = self._plans.get(known)
        if plan is None:
            plan = Plan(self, k, v, offset, latent)
            if not k.codec.state() and not v.codec.state():
                self._plans[known] = plan
        return plan

    def note(self, operation: Operation, backend: Backend, reason: str) -> None:
        """Remember why an operation is a backend's."""
        self._reasons.setdefault((operation, backend.name), reason)

    @property
    def name(self) -> str:
        """The backends in use, such as ``cpu`` or ``cpu, torch``; before any is, what was asked."""
        used = {backend for _, backend in self._reasons}
        return ", ".join(b.name for b in BACKENDS if b.name in used) or self.requested

    def __deepcopy__(self, memo: dict[int, Any]) -> Compute:
        """Copies of a cache compute in the same way, and are counted together."""
        return self

    def stats(self) -> dict[str, Any]:
        """Return ``name``, ``requested``, ``reasons``, and counts by operation and backend."""
        reasons = {f"{op}: {name}": why for (op, name), why in self._reasons.items() if why}
        return {
            "name": self.name,
            "requested": self.requested,
            "reasons": reasons,
            **self.counts.as_dict(),
        }


class StreamPlan:
    """The backends that encode and decode one stream; `limit`: what compiled code surely encodes.

    `before`: the plan of the codec that had not learnt yet, where the same backends cover both.
    """

    before: StreamPlan | None = None

    def __init__(
        self, compute: Compute, codec: Codec, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.codec, self.device, self.dtype, self._compute = codec, device, dtype, compute
        one = (codec,)
        self._encode, why_encode = compute.backend("encode", one, device, dtype)
        self._decode, why_decode = compute.backend("decode", one, device, dtype)
        compute.note("encode", self._encode, why_encode)
        compute.note("decode", self._decode, why_decode)
        self.encoder: Encoder = self._encode.encoder(codec)
        form = codec.form
        self.limit = form.limit if form is not None and form.encoder else None
        self._rest = TorchEncoder(codec)

    def for_codec(self, codec: Codec) -> StreamPlan:
        """Return a plan for the stream's codec after it has learnt."""
        if not self.codec.learns_from:  # a basis, for one, may decide who covers it
            return StreamPlan(self._compute, codec, self.device, self.dtype)
        other = object.__new__(StreamPlan)
        other.__dict__.update(self.__dict__)
        other.codec, other.encoder = codec, self._encode.encoder(codec)
        other._rest, other.before = TorchEncoder(codec), self
        return other

    def learnt(self, x: Tensor, context: Context) -> StreamPlan:
        """Return a plan for a codec that learnt from the first tokens; see `Backend.learn`."""
        reason = self._encode.covers("learn", self.codec, self.dtype)
        backend = TORCH if reason else self._encode
        codec = backend.learn(self.codec, x, context)
        self._compute.counts.add(f"torch: {reason}" if reason else backend.name, learn=1)
        return self.for_codec(codec)

    def fork(self) -> StreamPlan:
        """Return a plan for a copy of the stream; encoders serve one stream each."""
        return StreamPlan(self._compute, self.codec, self.device, self.dtype)

    def prepare(
        self, x: Tensor, frozen: Arrays | None = None, size: float | None = None
    ) -> tuple[Encoder, Any]:
        """Do all that can refuse tokens; return what writes them and what it writes.

        With `frozen` side information of a group that was cut, `x` is its rest: the torch body's.
        """
        if frozen is not None:
            self._compute.counts.add("torch: the rest of a group that was cut", encode=1)
            return self._rest, self._rest.prepare(x, frozen=frozen)
        prepared = self.encoder.prepare(x, size)
        who = self._encode.name
        if who != "torch" and isinstance(prepared, dict):
            who = "torch: magnitudes that may be beyond the format"
        self._compute.counts.add(who, encode=1)
        return self.encoder, prepared

    def decode(self, view: StreamView, start: int, end: int, out: Tensor) -> None:
        """Decode packed tokens into `out`, with their offset, sink tokens as they were given."""
        if not out.shape[3]:
            return
        if view.offset is None:
            self.decode_slots(view, start, end, out)
        else:
            y = torch.empty_like(out, dtype=torch.float32)
            self.decode_slots(view, start, end, y)
            out.copy_(saturated(view.offset.put_back(y, start), out.dtype))
        view.place_sinks(out, start, lambda x: x)

    def decode_slots(self, slots: SlotReader, start: int, end: int, out: Tensor) -> None:
        """Decode packed tokens into `out`; see `Backend.decode`."""
        self._decode.decode(slots, start, end, out, inverse=True)
        self._compute.counts.add(self._decode.name, decode=1)


class Plan:
    """The backends that compute for one layer; `one_backend`: one does it all, steps too."""

    def __init__(
        self, compute: Compute, k: StreamPlan, v: StreamPlan, offset: bool, latent: bool
    ) -> None:
        self.k, self.v, self.compute = k, v, compute
        self._runners: dict[str, ref[StepRunner]] = {}  # in common with `after`; none is kept
        codecs = k.codec, v.codec
        self._attend, why = compute.backend("attend", codecs, k.device, k.dtype, offset, latent)
        self._name = self._attend.name
        self.count = partial(compute.counts.add, self._name)  # of what runners did
        self.one_backend = self._attend is k._encode is v._encode and self._attend is not TORCH
        self._new: Backend | None = None
        compute.note("attend", self._attend, why)

    def after(self, k: StreamPlan) -> Plan:
        """Return the plan for K's codec after it has learnt; the same backends cover it."""
        other = object.__new__(Plan)
        other.__dict__.update(self.__dict__)
        other.k = k
        return other

    def attend(self, calls: Sequence[AttendCall]) -> Tensor:
        """Attend: `[sum of B, H_q, q_len, D_v]`; see `Backend.attend`."""
        for call in calls:
            check_call(call)
        if any(call.config.sparse for call in calls) and not self.compute.deferred:
            output = self._attend_chosen(calls)
            if output is not None:
                return output
        backend, name = self._attend, self._name
        if calls[0].view is None and (len(calls) == 1 or all(call.view is None for call in calls)):
            backend = self._for_new(calls[0])
            name = backend.name
        output = backend.attend(calls)
        self.compute.counts.add(name, attend=len(calls))
        return output

    def attend_made(self, call: AttendCall, keys: KeyMaking) -> Tensor:
        """Attend over values, of which `keys` makes the keys: torch multiplies them."""
        if call.view is None and call.v is not None:
            return self.attend((call._replace(k=keys.make(call.v, 0)),))
        check_call(call)
        self.compute.counts.add("torch: keys are made of values", attend=1)
        return attend(call, (self.v.decode, keys))

    def _attend_chosen(self, calls: Sequence[AttendCall]) -> Tensor | None:
        """Attend to the tokens alone that masks let through; None where no mask is so sparse."""
        chosen = [chosen_calls(call, self._attend.copy_slots) for call in calls]
        if not any(chosen):
            return None
        outputs = []
        for call, few in zip(calls, chosen, strict=True):
            if few:
                self.compute.counts.add(f"{self._name}, of chosen tokens", attend=1)
                outputs.append(self._attend.attend(few).view(*call.q.shape[:3], -1))
            else:
                whole = call._replace(config=replace(call.config, sparse=False))
                outputs.append(self.attend((whole,)))
        return torch.cat(outputs)

    def _for_new(self, call: AttendCall) -> Backend:
        """Return the backend that attends over a prompt without a past, whatever the codecs are."""
        if self._new is None:
            assert call.k is not None and call.v is not None
            named = self.compute.named
            self._new = self._attend if named else covering_new(call.k, call.v)
        return self._new

    def prompt(
        self, sides: tuple[PromptSide, PromptSide], q: Tensor | None, seen: tuple[int, int]
    ) -> PromptRunner | None:
        """Return the runner that stores such first tokens, where one backend does it all."""
        codecs = self.k.codec, self.v.codec
        return self._attend.prompt(codecs, sides, q, seen) if self.one_backend else None

    @property
    def last_runner(self) -> StepRunner | None:
        """The runner that `step` last made for any layer with the same plan."""
        last = self._runners.get("last")
        return None if last is None else last()

    def step(self, call: AttendCall, good: Tensor | None = None) -> StepRunner | None:
        """Return the runner of steps like a call, where one backend does it all."""
        if not self.one_backend:
            return None
        check_call(call)
        if self.compute.deferred and good is None:
            good = torch.ones((), dtype=torch.bool, device=self.k.device)
        runner = self._attend.step(call, good if self.compute.deferred else None)
        if runner is not None and call.padding is None and not self.compute.deferred:
            self._runners["last"] = ref(runner)
        return runner

    def __repr__(self) -> str:
        sides = zip("kv", (self.k, self.v), strict=True)
        parts = [f"encode {x} {y._encode.name}, decode {x} {y._decode.name}" for x, y in sides]
        return f"Plan(attend {self._name}, {', '.join(parts)})"


def covering_new(k: Tensor, v: Tensor) -> Backend:
    """Return the first backend that attends over tokens `[B, H, T, D]` like these, all given."""
    dim, dtype = max(k.shape[3], v.shape[3]), k.dtype
    return next(x for x in BACKENDS if not x.runs_here(k.device) and not x.covers_new(dim, dtype))


def attend_exact(k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> Tensor:
    """Attend over tokens that are all given: `[B, H_q, q_len, D_v]`, parameters as of a call."""
    call = AttendCall(None, k, v, q, config)
    check_call(call)
    return covering_new(k, v).attend((call,))
