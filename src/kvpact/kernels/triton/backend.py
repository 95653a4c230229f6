"""The Triton kernels as a backend. Triton itself is imported when a kernel is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from kvpact.kernels.base import (
    DTYPES,
    AttendCall,
    Backend,
    Encoder,
    Operation,
    SlotReader,
    StepRunner,
)
from kvpact.kernels.torch.slots import TorchEncoder, copies
from kvpact.kernels.triton.forms import MOST_WIDTH, on_device, slots_of
from kvpact.methods import Codec
from kvpact.methods.trellis_learning import TreatedKeys

_CPU = torch.device("cpu")
LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)


@cache
def installed() -> str:
    """Return Triton's version; "" where there is none."""
    if find_spec("triton") is None:
        return ""
    try:
        return version("triton")
    except PackageNotFoundError:
        import triton

        return str(triton.__version__)


def interpreted() -> bool:
    """Return whether Triton interprets its kernels, on the CPU (``TRITON_INTERPRET=1``)."""
    if not installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


class TritonBackend(Backend):
    """Kernels for CUDA devices; `on_cpu`: on the CPU, where Triton interprets them, for tests."""

    name = "triton"

    def __init__(self, on_cpu: bool = False) -> None:
        self._on_cpu, self.kind = on_cpu, "cpu" if on_cpu else "cuda"

    def describe(self) -> str:
        """Return the version of Triton."""
        how = ", interpreted" if self._on_cpu else ""
        return f"triton: kernels for CUDA devices, Triton {installed() or 'missing'}{how}"

    def runs_here(self, device: torch.device) -> str:
        """Run on CUDA devices from sm_80 on; on the CPU where kernels are interpreted."""
        found = installed()
        if not found:
            return "Triton is not installed: pip install 'kvpact[triton]'"
        if tuple(int(part) for part in found.split(".")[:2]) < LEAST_TRITON:
            least = ".".join(map(str, LEAST_TRITON))
            return f"Triton {found} is older than {least}: pip install 'kvpact[triton]'"
        if self._on_cpu:
            here = device.type == "cpu" and interpreted()
            return "" if here else "kernels are interpreted on the CPU, with TRITON_INTERPRET=1"
        if device.type != "cuda":
            return f"the Triton kernels run on CUDA devices, not on {device}"
        if torch.version.hip is not None:
            return "the Triton kernels were not tested on AMD's devices"
        if not torch.cuda.is_available():
            return "no CUDA device is there"
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            return f"{device} is sm_{capability[0]}{capability[1]}; sm_80 or newer is needed"
        return ""

    def covers(self, operation: Operation, codec: Codec, dtype: torch.dtype) -> str:
        """Cover codecs whose form kernels decode (attend, decode) or encode."""
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        if operation == "learn":
            return "no kernel learns" if codec.learns_from else ""
        if operation == "encode":
            return "" if copies(codec) else slots_of(codec, _CPU).encode_reason
        slots = slots_of(codec, _CPU)
        if operation == "attend" and slots.form is not None:
            return _too_wide(slots.form.dim, dtype)
        return slots.reason

    def covers_offset(self) -> str:
        """Cover none: the logits that offsets add are not there."""
        return "keys without their offset"

    def covers_latents(self, codec: Codec) -> str:
        """Cover all but trellises that are treated as keys are: latents are values, too."""
        return "latents that are treated as keys are" if isinstance(codec, TreatedKeys) else ""

    def remark(self, k: Codec, v: Codec) -> str:
        """Say why the general kernel attends, also where few query heads share a KV head."""
        if not installed() or any(self.covers("attend", x, torch.bfloat16) for x in (k, v)):
            return ""
        from kvpact.kernels.triton.digits.fast import digits_reason
        from kvpact.kernels.triton.digits.tables import LEAST_ROWS

        slots = slots_of(k, _CPU), slots_of(v, _CPU)
        reason = digits_reason(*slots, LEAST_ROWS)
        return f"the general kernel attends: {reason}" if reason else ""

    def covers_new(self, dim: int, dtype: torch.dtype) -> str:
        """Cover prompts of any width that slots may have."""
        if dtype not in DTYPES:
            return f"dtype {dtype}"
        return _too_wide(dim, dtype)

    def attend(self, calls: Sequence[AttendCall]) -> Tensor:
        """Attend over all calls in one launch."""
        from kvpact.kernels.triton.attend.attend import attend_triton

        with on_device(calls[0].q.device):
            return attend_triton(calls)

    def step(self, call: AttendCall, good: Tensor | None = None) -> StepRunner | None:
        """Return a runner of steps on the device, where checks are deferred."""
        from kvpact.kernels.triton.step.step import TritonStep, covers

        return TritonStep(call, good) if good is not None and covers(call) else None

    def encoder(self, codec: Codec) -> Encoder:
        """Return an encoder."""
        if copies(codec):
            return TorchEncoder(codec)
        from kvpact.kernels.triton.encode.encoder import TritonEncoder

        return TritonEncoder(codec)

    def decode(
        self, slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool
    ) -> None:
        """Decode packed tokens."""
        from kvpact.kernels.triton.decode.kernel import decode_triton

        with on_device(out.device):
            decode_triton(slots, start, end, out, inverse)


def _too_wide(dim: int, dtype: torch.dtype) -> str:
    """Return why tiles of exact tokens don't fit shared memory or registers; "" if they do."""
    most = MOST_WIDTH // 2 if dtype is torch.float32 else MOST_WIDTH
    return f"{dtype} vectors of {dim} numbers; {most} is the most" if dim > most else ""


TRITON = TritonBackend()
