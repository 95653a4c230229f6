"""What can be done with a compressed cache of each model: right, or refused by name.

    python tests/helpers/operations.py [NAME …]

Each operation is done on a cache of spec ``none`` and compared with transformers' own cache, or
with a cache that never went another way; the last one on the default spec. What is found is
written to docs/kvpact_pages/operations.json, of which docs/support.md has a table.
"""

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import NAMES as MODELS
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache

from kvpact import Snapshot
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, prefix_cache, register_attention
from kvpact.integrations.transformers.versions import named
from kvpact.spec import DEFAULT_SPEC
from kvpact.stores import MemoryStore

PATH = Path(__file__).parents[2] / "docs" / "kvpact_pages" / "operations.json"
PACKED = " sliding="
NAMES = [*MODELS, *(x + PACKED for x in ("gemma3", "gemma4_text", "gpt_oss", "lfm3"))]
"""Models, and some of them whose layers with sliding attention are packed, too."""
WINDOW, CHUNK = 16, 32
_IDS = torch.randint(3, 128, (3, 140), generator=torch.Generator().manual_seed(7))
_GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class _Wrong(Exception):
    """A result is another one, and nothing said so."""


def _cache(model: Any, spec: str = "none") -> CompressedCache:
    """Return an empty cache; of values alone where keys are made of them."""
    alone = getattr(model.config, "attention_k_eq_v", False)
    packed = spec if spec == "none" else "int:bits=8,window=0"
    return CompressedCache(model, spec, k_eq_v=alone, sliding=packed if model.sliding else None)


def _run(model: Any, cache: Any, ids: Tensor, begin: int = 0) -> Tensor:
    """Return the logits of a text in calls of several tokens and of single ones."""
    ids, made = ids[:, begin:], []
    sizes = [min(n, ids.shape[1]) for n in (1, 5, 1)]
    sizes = [*sizes, ids.shape[1] - sum(sizes)] if ids.shape[1] > 7 else [ids.shape[1]]
    for part in ids.split(sizes, dim=1):
        places = torch.arange(begin, begin + part.shape[1])[None].expand(part.shape[0], -1)
        given = {"position_ids": places, "use_cache": True, **named(cache)}
        with torch.no_grad():
            made.append(model(part, **given).logits)
        begin += part.shape[1]
    return torch.cat(made, 1)


def _same(got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape or (got - wanted).abs().max() > 1e-4 * wanted.abs().max():
        raise _Wrong


def _held(model: Any, tokens: int, rows: Tensor | slice = slice(None)) -> tuple[Any, Tensor]:
    """Return a cache that holds the first tokens, and all of them."""
    cache, ids = _cache(model), _IDS[rows]
    _run(model, cache, ids[:, :tokens])
    return cache, ids


def tokens(model: Any) -> None:
    """Calls of many and of single tokens, within the window and beyond it."""
    caches = DynamicCache(config=model.config), _cache(model)
    wanted, got = (_run(model, x, _IDS) for x in caches)
    _same(got, wanted)


def padding(model: Any) -> None:
    """A batch with padding on the left."""
    mask = torch.ones_like(_IDS[:, :50])
    mask[0, :20], mask[1, :3] = 0, 0
    _generated(model, attention_mask=mask)


def beams(model: Any) -> None:
    """Beam search, which reorders rows in every step."""
    _generated(model, num_beams=3)


def _generated(model: Any, **options: Any) -> None:
    given = {**_GREEDY, **options}
    caches = DynamicCache(config=model.config), _cache(model)
    one, other = (model.generate(_IDS[:, :50], **given, **named(x)) for x in caches)
    if not torch.equal(one, other):
        raise _Wrong


def turns(model: Any) -> None:
    """A second turn on the cache of the first."""
    cache = _cache(model)
    first = model.generate(_IDS[:, :30], **_GREEDY, **named(cache))
    text = torch.cat([first, _IDS[:, 60:80]], 1)
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        model(first[:, :-1], **named(theirs))
    one, other = (model.generate(text, **_GREEDY, **named(x)) for x in (theirs, cache))
    if not torch.equal(one, other):
        raise _Wrong


def fork(model: Any) -> None:
    """A copy, and the cache that goes on beside it."""
    cache, ids = _held(model, 50)
    twin = copy.deepcopy(cache)
    wanted = _run(model, cache, ids[:, :80], 50)
    _run(model, cache, ids[:, :100], 80)
    _same(_run(model, twin, ids[:, :80], 50), wanted)


def crop(model: Any) -> None:
    """The last tokens forgotten, within the window and beyond it."""
    refused = None
    for held, kept in ((WINDOW - 4, WINDOW - 8), (50, 43)):
        cache, ids = _held(model, held)
        try:
            cache.crop(kept - held)
        except KVPactError as error:
            refused = error
            kept = held  # and the cache is as before
        never, _ = _held(model, kept)
        _same(_run(model, cache, ids[:, :70], kept), _run(model, never, ids[:, :70], kept))
    if refused is not None:
        raise refused


def select(model: Any) -> None:
    """Some rows of a batch."""
    cache, _ = _held(model, 50)
    rows = torch.tensor([2, 0])
    never, ids = _held(model, 50, rows)
    cache.batch_select_indices(rows)
    _same(_run(model, cache, ids[:, :70], 50), _run(model, never, ids[:, :70], 50))


def repeat(model: Any) -> None:
    """Every row of a batch twice."""
    cache, _ = _held(model, 50)
    rows = torch.arange(3).repeat_interleave(2)
    never, ids = _held(model, 50, rows)
    cache.batch_repeat_interleave(2)
    _same(_run(model, cache, ids[:, :70], 50), _run(model, never, ids[:, :70], 50))


def snapshot(model: Any) -> None:
    """A snapshot as bytes, restored bit for bit, before and behind the window."""
    for held in (WINDOW - 2, WINDOW, 50):
        cache, ids = _held(model, held)
        data = cache.snapshot().to_bytes()
        again = _cache(model)
        again.restore(Snapshot.from_bytes(data))
        if not torch.equal(_run(model, again, ids, held), _run(model, cache, ids, held)):
            raise _Wrong


def prefix(model: Any) -> None:
    """A stored prefix, for prompts that end at chunks and windows, and a token beside them."""
    borders = [n + d for n in (CHUNK, CHUNK + WINDOW, 3 * CHUNK) for d in (-1, 0, 1, 2)]
    for length in borders:
        with MemoryStore() as store:
            made = []
            for _ in range(2):
                cache, ids = _cache(model), _IDS[:1, :length]
                prefixes = prefix_cache(store, model, cache, fingerprint="x", chunk=CHUNK)
                held = prefixes.prefill(ids)
                more = torch.cat([ids, _IDS[:1, -20:]], 1)
                made.append(_run(model, cache, more, held))
        if held != (length - 1) // CHUNK * CHUNK or not torch.equal(*made):
            raise _Wrong
        _same(made[0], _run(model, DynamicCache(config=model.config), more)[:, held:])


def default(model: Any) -> None:
    """The default spec: close to an exact cache, copied and restored bit for bit."""
    cache, held = _cache(model, DEFAULT_SPEC), 110
    _run(model, cache, _IDS[:, :held])
    again, twin = _cache(model, DEFAULT_SPEC), copy.deepcopy(cache)
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    exact = DynamicCache(config=model.config)
    wanted = _run(model, exact, _IDS)[:, held:].double().log_softmax(-1)
    got = _run(model, cache, _IDS, held)
    kl = torch.nn.functional.kl_div(got.double().log_softmax(-1), wanted, log_target=True)
    same = all(torch.equal(_run(model, x, _IDS, held), got) for x in (again, twin))
    if not (same and kl * got.shape[-1] < 0.02):
        raise _Wrong


OPERATIONS: dict[str, Callable[[Any], None]] = {
    x.__name__: x
    for x in (tokens, padding, beams, turns, fork, crop, select, repeat, snapshot, prefix, default)
}


def outcome(name: str, operation: str) -> str:
    """Return ``right``, ``wrong``, ``refused: …``, or ``-`` where the model has no logits."""
    model = tiny_model(name.removesuffix(PACKED))
    model.sliding = name.endswith(PACKED)
    if operation in ("padding", "beams", "turns") and not hasattr(model, "generate"):
        return "-"
    register_attention()
    try:
        with warnings.catch_warnings(action="ignore"):
            OPERATIONS[operation](model)
    except KVPactError as error:
        return f"refused: {error}"
    except _Wrong:
        return "wrong"
    return "right"


def main() -> None:
    """Do everything, and write what was found."""
    names = sys.argv[1:] or NAMES
    found = json.loads(PATH.read_text("utf-8")) if sys.argv[1:] else {}
    for name in names:
        found[name] = {operation: outcome(name, operation) for operation in OPERATIONS}
        print(name, found[name], flush=True)
    found = {name: found[name] for name in NAMES}
    PATH.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
