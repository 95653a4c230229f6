"""Which layers get kvpact's pages and by which spec; no vLLM is needed."""

from types import SimpleNamespace

import pytest
import torch

from kvpact.errors import SpecError
from kvpact.integrations.vllm.setting import give_backends, layer_number, sliding_block
from kvpact.spec import parse_spec

FOUR, EIGHT = (parse_spec(f"{text},sinks=0") for text in ("turboquant:bits=4", "int:bits=8"))


class Plain:
    """What vLLM gives all layers."""

    stored = None


class Kind(Plain):
    """What it gives on another device."""


class Stored(Plain):
    """What a layer was given before."""

    stored = "a spec"


class Other:
    """What it gives others."""


def layer(backend=Plain, window=None, heads=2, kv_cache_dtype="auto"):
    return SimpleNamespace(
        attn_backend=backend, sliding_window=window, num_kv_heads=heads, head_size=64,
        head_size_v=64, kv_cache_dtype=kv_cache_dtype,
        kv_cache_torch_dtype=torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8,
    )  # fmt: skip


def give(layers, specs):
    def stored(kind, spec):
        return spec if kind is Plain else (kind, spec)

    give_backends(layers, Plain, specs, stored, lambda most: f"at most {most}", torch.bfloat16)
    return {name: getattr(one, "attn_backend", None) for name, one in layers.items()}


def test_each_layer_is_stored_by_its_own_spec():
    layers = {f"model.layers.{i}.self_attn.attn": layer() for i in (2, 0, 1)}
    given = give(layers, [FOUR, EIGHT, FOUR])
    assert list(given.values()) == [FOUR, FOUR, EIGHT]


def test_layers_with_a_window_know_the_largest_token_beside_them():
    layers = {
        "layers.0.attn": layer(window=8), "layers.1.attn": layer(heads=3), "layers.2.attn": layer(),
        "layers.3.experts": SimpleNamespace(), "layers.3.cross": layer(Other),
    }  # fmt: skip
    given = give(layers, [FOUR, FOUR, EIGHT, FOUR])
    # 68 bytes at 4 bits, 136 at 8.
    assert list(given.values()) == ["at most 272", FOUR, EIGHT, None, Other]


def test_what_was_given_stays_and_other_kinds_keep_their_kind():
    layers = {"a": layer(Kind), "b": layer(Stored), "c": layer(Stored, window=8)}
    assert list(give(layers, [FOUR]).values()) == [(Kind, FOUR), Stored, Stored]


def test_layers_of_kvpacts_dtype_have_the_models_from_then_on():
    layers = {"a": layer(kv_cache_dtype="kvpact"), "b": layer(window=8, kv_cache_dtype="kvpact")}
    assert list(give(layers, [FOUR]).values()) == [FOUR, "at most 136"]
    for one in layers.values():
        assert (one.kv_cache_dtype, one.kv_cache_torch_dtype) == ("auto", torch.bfloat16)


def test_a_single_spec_asks_for_no_numbers():
    assert give({"attn": layer()}, [FOUR] * 4) == {"attn": FOUR}
    with pytest.raises(SpecError, match="'attn' is not the name of one of 2 layers"):
        give({"attn": layer()}, [FOUR, EIGHT])


@pytest.mark.parametrize("name", ["model.layers.4.attn", "blocks.1.experts.2.attn", "attn", "a.-1"])
def test_names_that_tell_no_number_are_refused(name):
    with pytest.raises(SpecError, match="name one spec for all layers"):
        layer_number(name, 4)


@pytest.mark.parametrize(("tokens", "own", "full", "block"), [
    (128, 256, 68, 32),  # 8,192 of 8,704 bytes
    (128, 256, 136, 64),
    (128, 256, 256, 128),
    (384, 256, 68, 96),  # parts that are no power of two
    (256, 512, 68, 32),  # 64 tokens would be too many
    (32, 256, 68, 32),  # no page is small enough
])  # fmt: skip
def test_pages_beside_others_are_as_large_as_fits(tokens, own, full, block):
    assert sliding_block(tokens, own, full) == block
