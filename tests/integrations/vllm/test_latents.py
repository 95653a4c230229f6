"""Pages of MLA latents beside a contiguous cache of them: no vLLM is needed."""

import pytest
import torch
from vllm_pages import WindowBeside

from kvpact import AttendConfig, CacheGeometry
from kvpact.cache.specs import latent_spec
from kvpact.integrations.vllm.layer import PagedLayer
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.integrations.vllm.window import Row, WindowPool
from kvpact.spec import parse_spec

PAGE, HEADS, RANK, ROPE = 32, 4, 128, 64
CONFIG = AttendConfig(softmax_scale=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "none:sinks=0,window=0",
        "int:bits=8,sinks=0,window=0",
        "turboquant:bits=4,sinks=0",
        "turboquant:bits=4,sinks=0,window=5/fp8:sinks=0,window=5",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_steps_are_those_of_a_contiguous_cache(text, dtype):
    spec = latent_spec(parse_spec(text))
    c, r = codecs(spec, RANK, ROPE, dtype)
    form = PageForm(c, r, PAGE)
    # What other sequences left in the pages is cleared.
    pages = torch.full((8, 1, PAGE, form.content), 0xA5, dtype=torch.uint8)
    windows = WindowPool(spec.key.window, 2, PAGE, ((1, RANK), (1, ROPE)), dtype)
    layer = PagedLayer(form, native_plan(c, r, dtype, latent=True), pages, windows, latent=True)
    generator = torch.Generator().manual_seed(1)
    tables, counts = [[3, 0, 5], [7, 1, 2]], [[40, 0], [1, 33], [1, 1], [17, 1], [1, 1]]
    geometry = CacheGeometry.mla(1, RANK, ROPE, dtype)
    caches = [WindowBeside(text, geometry) for _ in tables]
    held = [0, 0]
    for batch in counts:
        total = sum(batch)
        q, latents, ropes = (
            torch.randn(total, heads, width, generator=generator).to(dtype)
            for heads, width in ((HEADS, RANK + ROPE), (1, RANK), (1, ROPE))
        )
        out = torch.full((total, HEADS, RANK), torch.nan, dtype=dtype)
        rows, right, start = [], [], 0
        for i, count in enumerate(batch):
            if not count:
                continue
            end = start + count
            table = tables[i][: -(-(held[i] + count) // PAGE)]
            rows.append(Row(start, end, held[i], tuple(table)))
            one = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (latents, ropes, q))
            right.append(caches[i].attend(0, *one, CONFIG)[0].transpose(0, 1))
            start, held[i] = end, held[i] + count
        assert layer.step(rows, q, latents, ropes, out, CONFIG) == {}
        assert torch.equal(out, torch.cat(right))
