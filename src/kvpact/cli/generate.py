"""``kvpact generate``: continue a text on a compressed cache, and print memory and speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import options
from kvpact.cli.console import note, print_document, print_pairs, size_text
from kvpact.cli.inputs import InputError, candidate_of, continued, prompt_text, prompted
from kvpact.cli.store import opened
from kvpact.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

    from kvpact.calibration import Calibration


TOO_SHORT = "nothing to save yet: all still exact"


@dataclass
class TextStream:
    """A streamer for `generate` of transformers: prints text, unless `quiet`, and takes times."""

    tokenizer: Any
    quiet: bool = False
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _printed: int = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt (the first call), then one token a call."""
        now = time.perf_counter()
        if not self.started:
            self.started = now
            return
        self.times.append(now)
        self.tokens += value.flatten().tolist()
        if not self.quiet:
            self._print(self.text(), final=False)

    def end(self) -> None:
        """Print the rest of the text."""
        if not self.quiet:
            self._print(self.text(), final=True)
            sys.stdout.write("\n")
            sys.stdout.flush()

    def text(self) -> str:
        """Return the text so far."""
        text: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text

    def _print(self, text: str, *, final: bool) -> None:
        # A character can span tokens: until its last byte is there it decodes to U+FFFD.
        end = len(text) if final else len(text.rstrip("\ufffd"))
        sys.stdout.write(text[self._printed : end])
        sys.stdout.flush()
        self._printed = max(end, self._printed)


def generate(
    prompt: str | None = typer.Argument(None, help="Text to continue."),
    file: Path | None = options.FILE,
    spec: str | None = options.SPEC,
    sliding: str | None = options.SLIDING,
    budget: str | None = options.BUDGET,
    model: str = options.MODEL,
    max_new_tokens: int = options.NEW_TOKENS,
    prompt_tokens: int | None = options.PROMPT_TOKENS,
    temperature: float = options.TEMPERATURE,
    top_p: float | None = options.optional(
        min=0.0,
        max=1.0,
        help="Nucleus sampling with this probability; at temperature 1 without --temperature.",
    ),
    seed: int = options.SAMPLING_SEED,
    chunk: int | None = options.optional(
        min=1, help="Tokens per prefill chunk; the whole prompt if omitted."
    ),
    chat: bool = typer.Option(False, "--chat", help="Wrap the prompt in the chat template."),
    calibration: Path | None = options.CALIBRATION,
    dtype: str = options.DTYPE,
    prefix_store: str | None = options.optional(
        metavar="STORE",
        help="Load the longest known prefix from this store (directory or URL); save new tokens.",
    ),
    storage: str | None = options.STORAGE_SPEC,
    tenant: str | None = options.optional("Name of a tenant; tenants share no prefixes."),
    password: str | None = options.PASSWORD,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Generate text on a compressed cache; prints memory and speed."""
    if storage is not None and prefix_store is None:
        raise InputError("--storage goes with --prefix-store")
    if budget is not None and prefix_store is not None:
        raise InputError("--prefix-store can't go with --budget: leave one of them out")
    candidate, text = candidate_of(spec, sliding, budget), prompt_text(file, prompt, "continue")
    loaded = (model, dtype, threads)
    cut: dict[str, Any] = {"new": max_new_tokens, "most": prompt_tokens}
    given = prompted(candidate, text, loaded, calibration, chat=chat, **cut)
    network, tokenizer, ids, cache, known = given
    sampling = sampling_of(temperature, top_p, seed)
    stream, started = TextStream(tokenizer, as_json), time.perf_counter()
    with prefix_of(prefix_store, network, cache, tenant, password, storage, known) as prefix:
        prefix.load(ids, stands=cache.stands)
        sampling |= {"prefill_chunk_size": chunk, "streamer": stream}
        prefix.save(continued(network, ids, cache, max_new_tokens, **sampling))
    figures = figures_of(cache, stream, ids.shape[1], network.dtype, prefix, started)
    if as_json:
        print_document("generate", spec=candidate.label, text=stream.text(), **figures)
    else:
        show(candidate.label, figures, prefix)


def sampling_of(temperature: float, top_p: float | None, seed: int) -> dict[str, Any]:
    """Return arguments of transformers' `generate`, none where decoding is greedy."""
    import torch

    if temperature == 0 and top_p is None:
        return {}
    torch.manual_seed(seed)
    return {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0}


def exact_size(stats: dict[str, Any], dtype: Any) -> int:
    """Return the bytes of an exact cache that holds the same, in the model's dtype."""
    return int(stats["values"] * dtype.itemsize + stats["own_bytes"])


def figures_of(
    cache: Any, stream: TextStream, length: int, dtype: Any, prefix: PromptPrefix, started: float
) -> dict[str, Any]:
    """Return the cache's bytes after a prompt of `length` tokens, and the speed."""
    stats = cache.stats()
    return {
        "prompt_tokens": length,
        "new_tokens": len(stream.tokens),
        "bytes": {**stats["bytes"], "own": stats["own_bytes"], "total": cache.memory_usage()},
        "exact_bytes": {str(dtype)[6:]: exact_size(stats, dtype)},
        "bits_per_value": stats["bits_per_value"],
        "slot_bits_per_value": stats["slot_bits_per_value"],
        "layers": stats["layers"],
        "seconds": {
            "first_token": stream.times[0] - started,
            "prefill": stream.times[0] - stream.started + prefix.computing,
            "decode": stream.times[-1] - stream.times[0],
        },
        "prefix": prefix.figures,
        "budget": stats.get("budget"),
    }


def show(spec: str, figures: dict[str, Any], prefix: PromptPrefix) -> None:
    """Print the figures of a generation."""
    new, parts, seconds = figures["new_tokens"], figures["bytes"], figures["seconds"]
    held, slots = parts["total"], figures["slot_bits_per_value"]
    ((dtype, exact),) = figures["exact_bytes"].items()
    share = f"  ({100 * held / exact:.0f} %)" if exact else ""
    packed = "none yet" if slots is None else f"{slots:.2f}"
    computed = figures["prompt_tokens"] - prefix.loaded
    rows = (
        ("prompt tokens", figures["prompt_tokens"]),
        ("new tokens", new),
        ("bytes held", size_text(held) + share),
        ("  packed slots", size_text(parts["codes"] + parts["side"])),
        ("  exact sinks and window", size_text(parts["sinks"] + parts["window"])),
        ("  allocated, not yet used", size_text(parts["unused"])),
        *([("  windows and states", size_text(parts["own"]))] if parts["own"] else []),
        (f"bytes of an exact cache, {dtype}", size_text(exact)),
        ("bits per value", f"{figures['bits_per_value']:.2f}" if held < exact else TOO_SHORT),
        ("bits per value, packed slots", packed),
        *_budget_rows(figures["budget"]),
        ("layers compressed / native", "{compressed} / {native}".format(**figures["layers"])),
        ("prefill, tokens/s", f"{computed / seconds['prefill']:.1f}"),
        ("decode, tokens/s", f"{(new - 1) / seconds['decode']:.1f}" if new > 1 else "-"),
        ("first token, seconds with the model loaded", f"{seconds['first_token']:.2f}"),
        *prefix.rows,
    )
    print_pairs(("cache", spec), rows)


def _budget_rows(budget: dict[str, Any] | None) -> list[tuple[str, str]]:
    if budget is None or "bits" not in budget:
        return []
    most = f"{budget['max_tokens']:,}"
    return [("mean bits within the budget", f"{budget['bits']:.2f}"), ("most tokens in it", most)]


class PromptPrefix:
    """Loads the longest known prefix, saves what is new, and keeps the figures; `None` does not.

    `rows` are names and figures for the table; more come with each call.
    """

    def __init__(self, prefixes: Any, *rows: tuple[str, str]) -> None:
        self._prefixes, self.rows, self.loaded = prefixes, list(rows), 0
        self.computing = 0.0

    @property
    def figures(self) -> dict[str, int] | None:
        """Tokens that came out of the store and went into it; None without a store."""
        if self._prefixes is None:
            return None
        return {"loaded_tokens": self.loaded, "saved_tokens": self._saved}

    def load(self, ids: Tensor, *, stands: bool) -> None:
        """Put the prefix of a prompt `[1, T]` into the cache, all but the last token at most.

        `stands`: whether the cache has windows or states, which are saved where the model stops:
        then the rest of the prompt's chunks is computed here, in `computing` seconds.
        """
        if self._prefixes is not None:
            begin = time.perf_counter()
            self.loaded = self._prefixes.load(ids[:, :-1])
            loaded = time.perf_counter()
            self.rows.append(("  loading the prefix", f"{loaded - begin:.2f}"))
            self.rows.append(("prompt tokens from the store", str(self.loaded)))
            if stands:
                self._try(lambda: self._prefixes.prefill(ids))
                self.computing = time.perf_counter() - loaded

    def save(self, ids: Tensor) -> None:
        """Save the chunks of the whole text, `[1, T]`, that the store does not have."""
        if self._prefixes is not None:
            self._try(lambda: self._prefixes.save(ids))
            self.rows.append(("tokens saved to the store", str(self._saved)))

    def _try(self, save: Callable[[], int]) -> None:
        """Save, and go on where that fails: the text is there, only the next run is slower."""
        try:
            save()
        except StoreError as error:
            note(f"the prefix was not saved: {error}")

    @property
    def _saved(self) -> int:
        return int(self._prefixes.written * self._prefixes.chunk)


@contextmanager
def prefix_of(
    url: str | None,
    model: Any,
    cache: Any,
    tenant: str | None,
    password: str | None,
    storage: str | None = None,
    calibration: Calibration | None = None,
) -> Iterator[PromptPrefix]:
    """Open a store, which is made if need be, for the prefixes of a model; None: there is none."""
    if url is None:
        yield PromptPrefix(None)
        return
    from kvpact.integrations.fingerprint import model_fingerprint
    from kvpact.integrations.transformers import prefix_cache

    with opened(url, password, create=True) as store:
        begin = time.perf_counter()
        fingerprint = model_fingerprint(model)
        row = ("  fingerprint of the model", f"{time.perf_counter() - begin:.2f}")
        learnt = calibration if storage else None
        given: dict[str, Any] = {"tenant": tenant, "storage": storage, "calibration": learnt}
        prefixes = prefix_cache(store, model, cache, fingerprint=fingerprint, **given)
        yield PromptPrefix(prefixes, row)
