"""``kvpact generate``: continue a text on a compressed cache, and say what the cache took."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import options
from kvpact.cli.console import print_table, size_text, table
from kvpact.cli.document import print_document
from kvpact.cli.inputs import InputError, prompt_text

if TYPE_CHECKING:
    from torch import Tensor

    from kvpact.cli.prefix import Prefix


@dataclass
class Stream:
    """What `generate` of transformers calls a streamer: prints text and takes the times.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Turns tokens into text.
    quiet : bool
        Whether nothing is printed.
    """

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
        """Print what is left."""
        if not self.quiet:
            self._print(self.text(), final=True)
            sys.stdout.write("\n")

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
    spec: str = options.SPEC,
    model: str = options.MODEL,
    max_new_tokens: int = options.NEW_TOKENS,
    temperature: float = typer.Option(0.0, min=0.0, help="Sampling temperature; 0 is greedy."),
    top_p: float | None = typer.Option(
        None,
        min=0.0,
        max=1.0,
        help="Nucleus sampling with this probability; at temperature 1 without --temperature.",
        show_default=False,
    ),
    seed: int = typer.Option(0, help="Seed for sampling."),
    chunk: int | None = typer.Option(
        None,
        min=1,
        help="Tokens per prefill chunk; the whole prompt if omitted.",
        show_default=False,
    ),
    chat: bool = typer.Option(False, "--chat", help="Wrap the prompt in the chat template."),
    calibration: Path | None = options.CALIBRATION,
    dtype: str = options.DTYPE,
    prefix_store: str | None = typer.Option(
        None,
        metavar="STORE",
        help="Load the longest known prefix from this store (directory or URL); save new tokens.",
        show_default=False,
    ),
    storage: str | None = options.STORAGE_SPEC,
    tenant: str | None = typer.Option(
        None, help="Name of a tenant; tenants share no prefixes.", show_default=False
    ),
    password: str | None = options.PASSWORD,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Generate text on a compressed cache; prints memory and speed."""
    import torch

    from kvpact.cli.network import (
        candidate_of,
        check_positions,
        continued,
        encode,
        load_calibration,
        open_model,
    )
    from kvpact.cli.prefix import prefix_of
    from kvpact.evaluate import compressed_cache

    if storage is not None and prefix_store is None:
        raise InputError("--storage goes with --prefix-store")
    candidate, text = candidate_of(spec), prompt_text(file, prompt, "continue")
    network, tokenizer = open_model(model, dtype, threads)
    ids = encode(tokenizer, text, chat=chat)
    check_positions(network, ids.shape[1], max_new_tokens)
    known = load_calibration(calibration, network)
    candidate = replace(candidate, calibration=known)
    cache = compressed_cache(network, candidate)
    sampling: dict[str, Any] = {}
    if temperature > 0 or top_p is not None:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0}
    stream, started = Stream(tokenizer, as_json), time.perf_counter()
    with prefix_of(prefix_store, network, cache, tenant, password, storage, known) as prefix:
        prefix.load(ids)
        sampling |= {"prefill_chunk_size": chunk, "streamer": stream}
        prefix.save(continued(network, ids, cache, max_new_tokens, **sampling))
    figures = figures_of(cache, stream, ids.shape[1], network.dtype, prefix, started)
    if as_json:
        print_document("generate", spec=spec, text=stream.text(), **figures)
    else:
        show(spec, figures, prefix)


def figures_of(
    cache: Any, stream: Stream, length: int, dtype: Any, prefix: Prefix, started: float
) -> dict[str, Any]:
    """Return what the cache holds and how fast it went.

    Parameters
    ----------
    cache : CompressedCache
        After the generation.
    stream : Stream
        Of the generation.
    length : int
        Tokens of the prompt.
    dtype : torch.dtype
        The model's.
    prefix : Prefix
        What came out of a store.
    started : float
        When it began, by `time.perf_counter`.
    """
    stats = cache.stats()
    exact = {"float16": 2, str(dtype).removeprefix("torch."): dtype.itemsize}
    return {
        "prompt_tokens": length,
        "new_tokens": len(stream.tokens),
        "bytes": {**stats["bytes"], "total": cache.memory_usage()},
        "exact_bytes": {name: stats["values"] * width for name, width in exact.items()},
        "bits_per_value": stats["bits_per_value"],
        "slot_bits_per_value": stats["slot_bits_per_value"],
        "layers": stats["layers"],
        "seconds": {
            "first_token": stream.times[0] - started,
            "prefill": stream.times[0] - stream.started,
            "decode": stream.times[-1] - stream.times[0],
        },
        "prefix": prefix.figures,
    }


def show(spec: str, figures: dict[str, Any], prefix: Prefix) -> None:
    """Print the figures of a generation."""
    new, parts, seconds = figures["new_tokens"], figures["bytes"], figures["seconds"]
    grid = table(("cache", spec))
    grid.add_row("prompt tokens", str(figures["prompt_tokens"]))
    grid.add_row("new tokens", str(new))
    held = parts["total"]
    grid.add_row("bytes held", size_text(held))
    grid.add_row("  packed slots", size_text(parts["codes"] + parts["side"]))
    grid.add_row("  exact sinks and window", size_text(parts["sinks"] + parts["window"]))
    grid.add_row("  allocated, not yet used", size_text(parts["unused"]))
    for name, exact in figures["exact_bytes"].items():
        times = f" ({exact / held:.2f} x)" if held else ""
        short = "fp16" if name == "float16" else name
        grid.add_row(f"bytes of an exact cache, {short}", size_text(exact) + times)
    grid.add_row("bits per value", f"{figures['bits_per_value']:.2f}")
    slots = figures["slot_bits_per_value"]
    none_yet = "no token has left the window yet"
    grid.add_row("bits per value, packed slots", f"{slots:.2f}" if slots == slots else none_yet)
    counts = "{compressed} / {native}".format(**figures["layers"])
    grid.add_row("layers compressed / native", counts)
    computed = figures["prompt_tokens"] - prefix.loaded
    grid.add_row("prefill, tokens/s", f"{computed / seconds['prefill']:.1f}")
    grid.add_row("decode, tokens/s", f"{(new - 1) / seconds['decode']:.1f}" if new > 1 else "-")
    first = f"{seconds['first_token']:.2f}"
    grid.add_row("first token, seconds with the model loaded", first)
    for name, value in prefix.rows:
        grid.add_row(name, value)
    print_table(grid)
