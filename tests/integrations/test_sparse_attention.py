"""Models whose layers choose the tokens they attend to: exact, or refused by name."""

import pytest
import torch
from attention_arguments import attention_arguments
from tiny_configs import deepseek
from transformers import DeepseekV32Config, DynamicCache
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

from kvpact import Snapshot
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, attention, facts, register_attention

CHOSEN = 3 * 8
"""Tokens that a query of the tiny MiniMax M3 attends to: blocks times their size."""
OF_ATTENTION = {"scaling", "dropout", "is_causal", "attention_mask", "query", "key", "value"}
REFUSED = {"block_indices", "indices", "sinks"}
REFUSED |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "kq"}
NEVER = {f"decoder_{x}" for x in ("attention_mask", "input_ids", "inputs_embeds", "position_ids")}
NEVER |= {"encoder_outputs", "grid_thw", "reverse"}
"""The walk takes one of two classes in a variable for the other: these have a taker on the way."""


@pytest.fixture
def m3(sizes):
    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(
        **{**sizes, "num_hidden_layers": 3},
        head_dim=16,
        rotary_dim=8,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "minimax_m3_sparse", "full_attention"],
        mlp_layer_types=["dense"] * 3,
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=3,
    )
    config._attn_implementation = "sdpa"
    model = MiniMaxM3VLTextModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model


def states(model, ids, cache, step):
    with torch.no_grad():
        parts = [
            model(part, past_key_values=cache).last_hidden_state for part in ids.split(step, 1)
        ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("attention", ["auto", "keep"])
def test_minimax_m3_is_exact_beyond_the_tokens_that_it_chooses(attention, m3, fallbacks):
    ids = torch.randint(0, 128, (2, 4 * CHOSEN), generator=torch.Generator().manual_seed(1))
    wanted = states(m3, ids, DynamicCache(config=m3.config), 8)
    cache, said = fallbacks(lambda: CompressedCache(m3, "none", attention=attention))
    got = states(m3, ids, cache, 8)
    assert cache.stats()["layers"] == {"compressed": 2, "native": 1}
    assert torch.allclose(got, wanted, atol=1e-4)
    assert ["choose the tokens" in text for text in said] == [True] * (attention == "auto")
    # The choice matters: with all tokens the result is another one.
    m3.config.index_topk_blocks = 1000
    for layer in m3.layers[1:2]:
        layer.self_attn.indexer.topk_blocks = 1000
    every = states(m3, ids, DynamicCache(config=m3.config), 8)
    assert (every - wanted)[:, :CHOSEN].abs().max() < 1e-4
    assert (every - wanted)[:, CHOSEN:].abs().max() > 0.01


def test_minimax_m3_goes_on_from_a_snapshot_with_the_keys_of_its_index(m3):
    ids = torch.randint(0, 128, (2, 4 * CHOSEN), generator=torch.Generator().manual_seed(1))
    cache, again = (CompressedCache(m3, "int:bits=8", attention="keep") for _ in range(2))
    states(m3, ids[:, : 2 * CHOSEN], cache, 8)
    data = cache.snapshot().to_bytes()
    assert b"record.1.idx_keys" in data
    again.restore(Snapshot.from_bytes(data))
    assert torch.equal(*(states(m3, ids[:, 2 * CHOSEN :], x, 8) for x in (cache, again)))
    again.batch_select_indices(torch.tensor([1]))
    assert again.layers[1].idx_keys.shape[0] == 1


def test_minimax_m3_with_attention_kvpact_is_refused_by_name(m3):
    register_attention()
    m3.set_attn_implementation("kvpact")
    for choice in ("auto", "keep"):
        with pytest.raises(KVPactError, match="choose the tokens"):
            CompressedCache(m3, "none", attention=choice)
    ids = torch.zeros(1, 40, dtype=torch.long)
    with pytest.raises(KVPactError, match=r"'block_indices'.*attention='keep'"):
        m3(ids, past_key_values=DynamicCache(config=m3.config))


def test_indices_of_sparse_attention_are_refused_by_name(make_model, sizes):
    index = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
    config = deepseek(sizes, DeepseekV32Config, **index)
    register_attention()
    model = make_model(config, "kvpact")
    with pytest.raises(KVPactError, match="passes 'indices' to attention"):
        model(torch.zeros(1, 40, dtype=torch.long), past_key_values=DynamicCache(config=config))


def test_a_model_that_chooses_its_tokens_keeps_its_attention(llama, fallbacks, monkeypatch):
    types = ["full_attention", "indexed_attention"]
    monkeypatch.setattr(facts, "get_layer_types_and_kwargs", lambda config: (types, [{}, {}]))
    made, said = fallbacks(lambda: CompressedCache(llama.config, "none"))
    assert llama.config._attn_implementation == "sdpa"
    assert type(made.layers[1]).__name__ == "DynamicIndexedLayer"
    assert len(said) == 1
    assert "choose the tokens" in said[0]


def test_every_argument_that_models_pass_to_attention_is_classified():
    known = attention.HONOURED | attention.HARMLESS
    assert not known & (REFUSED | NEVER)
    found = attention_arguments()
    unknown = {x: sorted(found[x]) for x in found.keys() - known - OF_ATTENTION - REFUSED - NEVER}
    assert not unknown, "read what these say, and add them to HONOURED, HARMLESS or REFUSED"
    # The walk sees what it is to see.
    assert {"indices", "block_indices", "s_aux", "position_ids", "use_cache"} <= found.keys()
    assert "minimax_m3_vl" in found["block_indices"]
    assert len(found["position_ids"]) > 100
