"""`calibration_of`: a model's calibration, found where it is kept or made once from a text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpact.calibration import Calibration
from kvpact.data import book_path
from kvpact.errors import GeometryError, KVPactError, MismatchError, SpecError
from kvpact.integrations import calibrations
from kvpact.integrations.calibrations import TOKENS, kept, learning, shipped, shipped_models, tell
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.models import first_tokens, opened
from kvpact.integrations.transformers.attention.calibrate import (
    LEAST_TOKENS,
    calibrate,
    key_rotations,
)
from kvpact.integrations.weights import part_of
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import DEFAULT_SPEC, Spec
from kvpact.stores import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROW = 2048  # most tokens that go through the model at once


def calibration_of(
    model: Any,
    spec: SpecLike | Sequence[Spec] = DEFAULT_SPEC,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    store: Store | None = None,
    fingerprint: str | None = None,
    adapter: str | None = None,
) -> Calibration:
    """Return what a spec's methods learnt of a model, for pages, prefixes and engines.

    It is found by the model's fingerprint in the folder that ``KVPACT_CACHE`` names. Where there
    is none it is made, from 4,096 tokens of the shipped book, and kept there; a line on stderr says
    so. Of ``smollm2`` and ``gemma3``, as `load_model` loads them, kvpact ships those to the default
    spec. Of several processes one makes it. ``kvpact calibrate MODEL --text FILE`` puts one of your
    texts in its place.

    Parameters
    ----------
    model : PreTrainedModel or str
        A decoder, or what `load_model` takes.
    spec : str, Spec, path, mapping or sequence of Spec
        A spec, a recipe with a spec per layer, or several specs.
    tokenizer : optional
        The model's, where it does not lie beside its weights.
    store : Store, optional
        One that several machines share: its calibration is taken, and it gets one where it has
        none.
    fingerprint, adapter : str, optional
        As in `prefix_cache`.

    Raises
    ------
    SpecError
        Nothing of the spec learns from tokens; or no folder can keep it.
    KVPactError
        The model has no tokenizer beside its weights, and none is given.
    MismatchError
        The model's weights can't be read, or it has adapters and `adapter` is missing.

    Examples
    --------
    >>> calibration = kvpact.calibration_of(model)
    >>> cache = kvpact.PagedKVCache("trellis:bits=4", geometry, calibration=calibration)
    """
    model, tokenizer = model if isinstance(model, tuple) else (model, tokenizer)
    if isinstance(model, str):
        model, tokenizer = opened(model, None)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    given = layer_specs(spec, layers) if isinstance(spec, str | Spec | PathLike | Mapping) else spec
    specs = learning(given)
    if not specs:
        raise SpecError(f"{str(spec)!r} learns nothing of a model: it needs no calibration")
    name = (fingerprint or model_fingerprint(model, adapter=adapter)) + part_of(model)

    def make() -> Calibration:
        size = 0 if part_of(model) else sum(x.numel() for x in model.parameters())
        if any(known["numbers"] == size for known in shipped_models().values()):
            with suppress(MismatchError):  # of weights that can't be read
                if (ready := shipped(loaded_fingerprint(model), specs)) is not None:
                    return replace(ready, model=name)
        try:
            _, reader = opened(model, tokenizer)
        except KVPactError as error:
            raise SpecError(
                f"{', '.join(map(str, specs))} learns from a text, and the model has no tokenizer "
                "beside its weights: write calibration=kvpact.calibration_of(model, "
                "tokenizer=tokenizer) where the cache is made, or take a spec that learns nothing, "
                "as 'turboquant:bits=4'"
            ) from error
        begin = time.perf_counter()
        tell(f"calibrating {', '.join(map(str, specs))} to this model, once ...")
        text = book_path().read_text("utf-8")
        made = calibrate(model, text_rows(reader, [("the book", text)]), specs, fingerprint=name)
        took = time.perf_counter() - begin
        tell(f"calibrated in {took:.0f} s, kept in {calibrations.place_of(name, specs).parent}")
        return made

    if store is not None:
        return calibrations.shared(store, name, specs, lambda: kept(name, specs, make))
    return kept(name, specs, make)


def loaded_fingerprint(model: Any) -> str:
    """Return a fingerprint of weights and RoPE; of a config nothing, whose names change."""
    turns = {i: x.frequencies.bfloat16().tolist() for i, x in key_rotations(model).items()}
    return model_fingerprint(model, config={"rope": turns})


def text_rows(tokenizer: Any, texts: list[tuple[str, str]], tokens: int = TOKENS) -> list[Tensor]:
    """Return equal pieces of texts, as much of each: at most `tokens` tokens in all.

    What the tokenizer puts in front of texts is in front of each piece, too: what is learnt of the
    first key is of that token, which may draw much of the attention.
    """
    share = tokens // len(texts)
    ids = [first_tokens(tokenizer, content, share) for _, content in texts]
    short = min(zip(ids, texts, strict=True), key=lambda pair: len(pair[0]))
    if len(short[0]) < LEAST_TOKENS:
        raise GeometryError(
            f"{short[1][0]} gives {len(short[0])} of {tokens} tokens from {len(texts)} texts; "
            f"every text has to give {LEAST_TOKENS} or more"
        )
    length = min(len(one) // -(-len(one) // _ROW) for one in ids)
    rows, empty = [], tokenizer("")["input_ids"]
    for one in ids:
        same = [int(x) == y for x, y in zip(one, empty, strict=False)]
        front = one[: [*same, False].index(False)]  # after it there may be a token of the end
        size = length - len(front)
        parts = torch.split(one[len(front) :], size)
        rows += [torch.cat([front, part]) for part in parts if len(part) == size]
    return rows
