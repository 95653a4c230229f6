"""Tensors come to the CPU with all their bits, from wherever they lie."""

import pytest
import torch

from kvpact.snapshot.pages import on_host, pack_pages, unpack_pages
from kvpact.snapshot.state import FieldInfo, StreamState

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
DTYPES = (torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float32)


def random_bytes(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, size, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_arrive_whatever_the_strides(dtype, device):
    near = random_bytes(2, 3, 40, 24, dtype=dtype)
    for part in (near, near[:, :, 5:17], near.mT, near[:, 1, ::3, ::2], near[:, :, :0]):
        far = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device=device)
        found = on_host(far.copy_(part))
        assert found.device.type == "cpu" and found.shape == part.shape
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (found, part)))


def test_what_is_on_the_cpu_is_not_copied():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2), requires_grad=True)
    found = on_host(x)
    assert found.data_ptr() == x.data_ptr() and not found.requires_grad


@needs_gpu
def test_the_copy_waits_for_what_was_queued_before_it():
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda._sleep(50_000_000)
    x += 7
    assert bool((on_host(x) == 7).all())


@pytest.mark.parametrize("device", DEVICES)
def test_pages_hold_what_slots_held(device):
    field = FieldInfo("codes", torch.int32, (4, 16), 32)
    slots = random_bytes(2, 3, 6, 4, 16, dtype=torch.int32)
    tail = torch.zeros(2, 3, 0, 8)
    stream = StreamState((field,), {"codes": slots.to(device)}, 192, 0, tail, None, {})
    (found,) = unpack_pages(pack_pages([stream], 3, 64), [(field,)], (2, 3), 64)
    assert torch.equal(found["codes"], slots)
