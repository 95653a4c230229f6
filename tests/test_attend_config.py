"""`AttendConfig` refuses by name what cannot be meant; both backends agree on all the rest."""

import pytest
import torch
from closeness import WHOLE_BOUND, error

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import DtypeError, GeometryError
from kvpact.kernels.cpu.library import _load

HEADS, GROUPS, DIM = 2, 3, 20


@pytest.mark.parametrize(("fields", "error"), [
    ({"sliding_window": 2**63}, GeometryError), ({"sliding_window": 0}, GeometryError),
    ({"sliding_window": 2.5}, DtypeError), ({"sliding_window": True}, DtypeError),
    ({"n_kv_groups": 0}, GeometryError), ({"n_kv_groups": 2.0}, DtypeError),
    ({"is_causal": None}, DtypeError), ({"is_causal": 1}, DtypeError),
    ({"exact_new": "yes"}, DtypeError), ({"softmax_scale": 1e39}, GeometryError),
    ({"softmax_scale": -1e-46}, GeometryError), ({"softmax_scale": float("nan")}, GeometryError),
    ({"softmax_scale": "0.1"}, DtypeError), ({"softmax_scale": True}, DtypeError),
    ({"softcap": 1e39}, GeometryError), ({"softcap": 1e12}, GeometryError),
    ({"softcap": 1e-46}, GeometryError), ({"softcap": -1.0}, GeometryError),
    ({"softcap": torch.ones(2)}, DtypeError), ({"padding": torch.tensor([-1])}, GeometryError),
    ({"padding": torch.tensor([1.7])}, GeometryError),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(fields, error):
    (name,) = fields
    with pytest.raises(error, match=name):
        AttendConfig(**fields)


def output(backend: str, config: AttendConfig, new: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    geometry = CacheGeometry(1, HEADS, DIM, dtype=torch.float32)
    cache = create_cache("turboquant:bits=4,sinks=3,window=7", geometry, backend=backend)
    cache.prefill(0, *torch.randn(2, 2, HEADS, 301, DIM, generator=generator))
    k, v = torch.randn(2, 2, HEADS, new, DIM, generator=generator)
    q = torch.randn(2, HEADS * GROUPS, new, DIM, generator=generator)
    return cache.attend(0, k=k, v=v, q=q, config=config)


@pytest.mark.skipif(isinstance(_load(), str), reason="the native kernels are not built")
@pytest.mark.parametrize("new", [1, 5, 19])
@pytest.mark.parametrize("fields", [
    {"sliding_window": 2**63 - 1}, {"sliding_window": 1}, {"softmax_scale": 0},
    {"softmax_scale": 1e-30}, {"softmax_scale": -1e30}, {"softmax_scale": 1e30},
    {"softmax_scale": torch.tensor(0.3)}, {"softcap": 1e-30}, {"softcap": 3}, {"softcap": 1e6},
    {"softcap": 1e8}, {"softcap": 1e8, "softmax_scale": 1e30},
])  # fmt: skip
def test_both_backends_agree_on_what_is_accepted(fields, new):
    config = AttendConfig(**fields)
    expected, found = (output(backend, config, new) for backend in ("torch", "cpu"))
    assert expected.isfinite().all()
    assert error(expected, found) <= WHOLE_BOUND
