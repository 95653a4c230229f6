"""Caches of MLA latents: absorbed attention is attention over expanded heads."""

import pytest
import torch
from latent_heads import heads_of
from one_layer import normal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import kvpact
from kvpact.cache import bytes_per_token
from kvpact.errors import CacheFull, DtypeError, GeometryError, NonFiniteError, SpecError
from kvpact.kernels import absorb_query, expand_output
from kvpact.testing.data import by_name
from kvpact.testing.held import held_bytes

HEADS, NOPE, ROPE, V_DIM, RANK = 4, 16, 8, 12, 32
SCALE = (NOPE + ROPE) ** -0.5
CONFIG = kvpact.AttendConfig(softmax_scale=SCALE)


W_UK = normal(HEADS, NOPE, RANK, seed=100) * RANK**-0.5
W_UV = normal(HEADS, V_DIM, RANK, seed=101) * RANK**-0.5


def tokens(count: int, seed: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return latents, rotated keys and the two parts of the queries."""
    widths = ((1, RANK), (1, ROPE), (HEADS, NOPE), (HEADS, ROPE))
    sizes = enumerate(widths, seed * 10)
    made = [normal(batch, heads, count, width, seed=i) for i, (heads, width) in sizes]
    return made[0], made[1], made[2], made[3]


def expanded(c_kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of the heads, as a model without a latent cache has them."""
    k_nope = torch.einsum("bktr,hdr->bhtd", c_kv, W_UK)
    k = torch.cat([k_nope, k_rope.expand(-1, HEADS, -1, -1)], dim=-1)
    return k, torch.einsum("bktr,hdr->bhtd", c_kv, W_UV)


def reference(c_kv: Tensor, k_rope: Tensor, q: Tensor, mask: Tensor | None = None) -> Tensor:
    k, v = expanded(c_kv, k_rope)
    total, new = k.shape[2], q.shape[2]
    seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    seen = seen if mask is None else seen & mask
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_absorbed_is_expanded(layout):
    geometry = kvpact.CacheGeometry.mla(1, RANK, ROPE, torch.float32)
    pages = {"num_pages": 40} if layout == "paged" else {}
    cache = kvpact.create_cache("none", geometry, layout, **pages)
    latents, ropes = [], []
    for step, count in enumerate((70, 1, 260, 33)):
        c_kv, k_rope, q_nope, q_rope = tokens(count, step)
        latents.append(c_kv)
        ropes.append(k_rope)
        query = absorb_query(q_nope, q_rope, W_UK)
        output = cache.attend(0, k=c_kv, v=k_rope, q=query, config=CONFIG)
        held = torch.cat(latents, 2), torch.cat(ropes, 2)
        wanted = reference(*held, torch.cat([q_nope, q_rope], -1))
        got = expand_output(output, W_UV)
        assert got.shape == (2, HEADS, count, V_DIM)
        assert (got - wanted).norm() < 2e-6 * wanted.norm()


@pytest.mark.parametrize(
    "spec", ["int:bits=8", "turboquant:bits=4", "turboquant:bits=2,mode=prod", "kivi:bits=4", "fp8"]
)
def test_compressed_is_expanded_of_what_is_stored(spec):
    cache = kvpact.MLACache(spec, 1, RANK, ROPE)
    c_kv, k_rope, *_ = tokens(300, 0)
    cache.store(0, k=c_kv, v=k_rope)
    stored = cache.dequantize(0, "k"), cache.dequantize(0, "v")
    assert not torch.equal(stored[0], c_kv)
    assert torch.equal(stored[0][:, :, -64:], c_kv[:, :, -64:])
    new = tokens(3, 1)
    past = [torch.cat([x, y], 2) for x, y in zip(stored, new[:2], strict=True)]
    wanted = reference(*past, torch.cat(new[2:], -1))
    got = cache.attend_heads(0, **heads_of(*new, W_UK, W_UV))
    assert (got - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("windows", [(100, 0), (0, 100)])
def test_latents_and_rotated_keys_leave_their_windows_apart(windows, backend):
    """Where one side is packed and the other exact, each meets queries in its own space."""
    spec = "turboquant:bits=4,window={}/turboquant:bits=8,window={}".format(*windows)
    geometry = kvpact.CacheGeometry.mla(1, RANK, ROPE, torch.float32)
    cache = kvpact.create_cache(spec, geometry, backend=backend)
    cache.store(0, **by_name(*tokens(300, 0)[:2]))
    new = tokens(3, 1)
    stored = (cache.dequantize(0, side) for side in "kv")
    past = [torch.cat([x, y], 2) for x, y in zip(stored, new[:2], strict=True)]
    wanted = reference(*past, torch.cat(new[2:], -1))
    output = cache.attend(0, **by_name(*new[:2]), q=absorb_query(*new[2:], W_UK), config=CONFIG)
    assert (expand_output(output, W_UV) - wanted).norm() < 1e-5 * wanted.norm()


def test_rules_of_the_call():
    c_kv, k_rope, q_nope, q_rope = tokens(40, 0)
    query = torch.cat([q_nope, q_rope], -1)
    mask = normal(2, 1, 40, 40, seed=5) > -1
    mask |= torch.eye(40, dtype=torch.bool)
    cache = kvpact.MLACache("none", 1, RANK, ROPE)
    given = heads_of(c_kv, k_rope, q_nope, q_rope, W_UK, W_UV)
    got = cache.attend_heads(0, **given, config=kvpact.AttendConfig(mask=mask))
    assert torch.allclose(got, reference(c_kv, k_rope, query, mask), atol=1e-5)

    padding = torch.tensor([0, 7])
    cache = kvpact.MLACache("none", 1, RANK, ROPE)
    got = cache.attend_heads(0, **given, config=kvpact.AttendConfig(padding=padding))
    wanted = reference(c_kv[1:, :, 7:], k_rope[1:, :, 7:], query[1:, :, 7:])
    assert torch.allclose(got[1:, :, 7:], wanted, atol=1e-5)
    assert (got[1, :, :7] == 0).all()


@pytest.mark.parametrize("exact_new", [True, False])
def test_a_result_is_what_absorbed_attention_sees(exact_new):
    spec = "turboquant:bits=3,mode=prod,window=8"
    attending, reading = (kvpact.MLACache(spec, 1, RANK, ROPE) for _ in range(2))
    config = kvpact.AttendConfig(softmax_scale=SCALE, exact_new=exact_new)
    for step, count in enumerate((150, 1, 20)):
        c_kv, k_rope, q_nope, q_rope = tokens(count, step)
        query = absorb_query(q_nope, q_rope, W_UK)
        wanted = attending.attend(0, k=c_kv, v=k_rope, q=query, config=config)
        result = reading.prefill(0, c_kv, k_rope, query, config)
        assert result.logit_bias is None
        logits = query @ result.k.mT * SCALE
        seen = torch.ones(count, result.total, dtype=torch.bool).tril(result.total - count)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        assert torch.allclose(weights @ result.v, wanted, atol=2e-5)


def test_bytes_of_a_token_by_hand():
    # DeepSeek-V3: 512 + 64 numbers. 4 bits and an fp16 scale for the latent; the rotated key in
    # 8 bits with an fp16 scale per 32 numbers. In bf16 it is 1,152 bytes.
    by_hand = 512 * 4 // 8 + 2 + 64 + 64 // 32 * 2
    spec = "turboquant:bits=4,sinks=0,window=0"
    cache = kvpact.MLACache(spec, 2, 512, 64, dtype=torch.bfloat16)
    for layer in range(2):
        pair = (normal(1, 1, 256, 512, seed=layer), normal(1, 1, 256, 64, seed=layer + 2))
        cache.store(layer, k=pair[0].bfloat16(), v=pair[1].bfloat16())
    assert by_hand == 326
    assert cache.memory_usage() == held_bytes(cache) == 2 * 256 * by_hand
    assert str(cache.specs[0]) == f"{spec}/int:bits=8,sinks=0,window=0"
    planned = bytes_per_token(cache.specs[0], cache.geometry)
    assert planned == {"key_bytes": 258, "value_bytes": 68}


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_nothing_is_expanded_for_all_tokens():
    largest = []
    for count in (1024, 4096):
        cache = kvpact.MLACache("turboquant:bits=4", 1, RANK, ROPE)
        cache.store(0, **by_name(*tokens(count, 0, batch=1)[:2]))
        new = tokens(1, 1, batch=1)
        with _Largest() as seen:
            cache.attend_heads(0, **heads_of(*new, W_UK, W_UV))
        largest.append(seen.numel)
    assert largest[0] == largest[1] < 1024 * HEADS * NOPE


def test_the_method_of_the_rotated_key():
    def spec(text: str, rope: str | None = None) -> str:
        return str(kvpact.MLACache(text, 1, RANK, ROPE, rope=rope).specs[0])

    assert spec("turboquant:bits=4,window=8") == "turboquant:bits=4,window=8/int:bits=8,window=8"
    assert spec("turboquant:bits=4", rope="fp8") == "turboquant:bits=4/fp8"
    assert spec("turboquant:bits=4/fp8") == "turboquant:bits=4/fp8"
    assert spec("none") == "none" and spec("none", rope="int:bits=8") == "none/int:bits=8"
    assert spec("int:bits=4", rope="int:bits=4") == "int:bits=4/int:bits=4"
    assert spec("int:bits=4/int:bits=4") == "int:bits=4/int:bits=4"
    assert spec("int:bits=8") == "int:bits=8/int:bits=8"
    for text in ("none", "int:bits=4", "turboquant:bits=4/fp8", "int:bits=4/int:bits=4"):
        assert spec(spec(text)) == spec(text)
    for text, rope in (("int:bits=4/fp8", "fp8"), ("int:bits=4", "fp8/none"),
                       ("fp8/fp8", "fp8")):  # fmt: skip
        with pytest.raises(SpecError, match="more than one method for k_rope"):
            spec(text, rope)
    geometry = kvpact.CacheGeometry.mla(1, RANK, ROPE)
    made = kvpact.create_cache({"default": "none", "layers": {"0": "int:bits=4"}}, geometry)
    assert made.specs == [kvpact.parse_spec("int:bits=4/int:bits=8")]


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_wrong_input_changes_nothing(layout):
    geometry = kvpact.CacheGeometry.mla(1, RANK, ROPE, torch.float32)
    pages = {"num_pages": 8} if layout == "paged" else {"max_tokens": 100}
    cache = kvpact.create_cache("int:bits=4", geometry, layout, **pages)
    c_kv, k_rope, q_nope, q_rope = tokens(80, 0)
    query = absorb_query(q_nope, q_rope, W_UK)
    cache.attend(0, k=c_kv, v=k_rope, q=query, config=CONFIG)
    before = held_bytes(cache)
    wrong = [
        (GeometryError, "softmax_scale", (c_kv, k_rope, query, None)),
        (GeometryError, "q has width 32, the cache 40", (c_kv, k_rope, query[..., :32], CONFIG)),
        (GeometryError, "k has 2 heads", (c_kv.repeat(1, 2, 1, 1), k_rope, query, CONFIG)),
        (GeometryError, "v has width 7", (c_kv, k_rope[..., 1:], query, CONFIG)),
        (GeometryError, "n_kv_groups", (c_kv, k_rope, query,
                                        kvpact.AttendConfig(softmax_scale=1.0, n_kv_groups=2))),
        (NonFiniteError, "k holds NaN", (c_kv * torch.nan, k_rope, query, CONFIG)),
        (CacheFull, "wanted", (c_kv.repeat(1, 1, 4, 1), k_rope.repeat(1, 1, 4, 1),
                         query.repeat(1, 1, 4, 1), CONFIG)),
    ]  # fmt: skip
    for error, words, (c, r, q, config) in wrong:
        with pytest.raises(error, match=words):
            cache.attend(0, k=c, v=r, q=q, config=config)
        assert cache.seq_len(0) == 80 and held_bytes(cache) == before
    with pytest.raises(GeometryError, match="latents have one head"):
        kvpact.CacheGeometry(1, 2, RANK, ROPE, latent=True)
    heads = kvpact.MLACache("none", 1, RANK, ROPE)
    parts = q_nope, q_rope, W_UK, W_UV
    wrong_parts = [
        (GeometryError, "w_uv has shape", (q_nope, q_rope, W_UK, W_UV[:, :, :5])),
        (GeometryError, "w_uk has shape", (q_nope[..., 1:], q_rope, W_UK, W_UV)),
        (GeometryError, "q_rope has shape", (q_nope, q_rope[:1], W_UK, W_UV)),
        (DtypeError, "w_uv is torch.float64", (q_nope, q_rope, W_UK, W_UV.double())),
        (DtypeError, "w_uk should be a torch tensor", (q_nope, q_rope, "x", W_UV)),
    ]
    for error, words, given in wrong_parts:
        with pytest.raises(error, match=words):
            heads.attend_heads(0, **heads_of(c_kv, k_rope, *given))
        assert heads.seq_len(0) == 0
    heads.attend_heads(0, **heads_of(c_kv, k_rope, *parts))
