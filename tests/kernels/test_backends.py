"""Every backend goes through the kit; a wrong one does not pass."""

import pytest
import torch

from kvpact.kernels import BACKENDS
from kvpact.kernels.cpu.backend import CpuBackend
from kvpact.kernels.torch.backend import TorchBackend
from kvpact.kernels.triton.backend import TRITON
from kvpact.testing import BackendContract
from kvpact.testing.backend import unwritten_is_nan


class TestCpu(BackendContract):
    def make_backend(self):
        return CpuBackend()


def test_every_backend_is_here():
    """All but torch, which defines the results; Triton's are tested in a folder of their own."""
    tested = {case().make_backend().name for case in (TestCpu,)} | {TRITON.name}
    assert tested == {backend.name for backend in BACKENDS} - {TorchBackend.name}


class Broken(TorchBackend):
    """Encodes other numbers, decodes with an error, and leaves the last channel unwritten."""

    name = "broken"

    def attend(self, calls):
        output = super().attend(calls)
        found = torch.empty_like(output)
        found[..., :-1] = output[..., :-1]
        return found

    def decode(self, slots, start, end, out, *, inverse):
        super().decode(slots, start, end, out, inverse=inverse)
        out += 1e-6 * out.abs().max()

    def encoder(self, codec):
        inner = super().encoder(codec)

        class Shifted:
            def prepare(self, x, size=None):
                return inner.prepare(x * 1.01)

            def write(self, *arguments):
                inner.write(*arguments)

        return Shifted()

    def learn(self, codec, x, context):
        return super().learn(codec, x, context._replace(sinks=context.sinks + 1))


class Judged(BackendContract):
    __test__ = False

    def make_backend(self):
        return Broken()


@pytest.mark.parametrize("check", [
    lambda kit: kit.test_encoded_bytes("int:bits=4", "key"),
    lambda kit: kit.test_decoded_numbers("int:bits=4", "key"),
    lambda kit: kit.test_attention_over_every_method("int:bits=4"),
    lambda kit: kit.test_what_codecs_learn("trellis", "key"),
], ids=["encode", "decode", "attend", "learn"])  # fmt: skip
def test_a_broken_backend_is_found(check):
    with pytest.raises(AssertionError):
        check(Judged())


def test_what_is_not_written_is_nan():
    with unwritten_is_nan():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
