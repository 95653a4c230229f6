"""A state that claims rows which it does not hold costs no memory."""

from dataclasses import replace

import pytest
import torch

from kvpact import CacheGeometry, create_cache, errors
from kvpact.cache.layer.states import restored_layer


def test_nothing_is_allocated_for_rows_that_a_file_only_claims():
    geometry = CacheGeometry(1, 2, 16, 8, torch.float16)
    cache = create_cache("int:bits=8", geometry)
    cache.store(0, k=torch.ones(2, 2, 10, 16).half(), v=torch.ones(2, 2, 10, 8).half())
    layer = cache.snapshot().layer(0)
    huge = []
    for stream in layer.streams:
        tail = stream.tail[:1, :, :0].expand(2**38, -1, -1, -1)
        slots = {name: x[:1, :, :0].expand(2**38, *x.shape[1:2], 0, *x.shape[3:])
                 for name, x in stream.slots.items()}  # fmt: skip
        huge.append(replace(stream, slots=slots, packed=0, start=0, tail=tail, sinks=None))
    empty = create_cache("int:bits=8", geometry)
    with pytest.raises(errors.FormatError, match="number of sinks"):
        claimed = replace(layer, streams=tuple(huge))
        restored_layer(empty.entry(0).empty(), claimed, torch.device("cpu"), shared=False)
