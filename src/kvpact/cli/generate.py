"""``kvpact generate``: continue a text on a compressed cache, and say what the cache took."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer

from kvpact.cli import options
from kvpact.cli.console import output_console, size_text, table
from kvpact.cli.inputs import (
    InputError,
    candidate_of,
    check_positions,
    continued,
    load_calibration,
    open_model,
    prompt_text,
)
from kvpact.cli.prefix import Prefix, prefix_of
from kvpact.cli.store import PASSWORD
from kvpact.evaluate import compressed_cache


@dataclass
class Stream:
    """What `generate` of transformers calls a streamer: prints text and takes the times.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Turns tokens into text.
    """

    tokenizer: Any
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _printed: int = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (the first call), then one token a call."""
        now = time.perf_counter()
        if not self.started:
            self.started = now
            return
        self.times.append(now)
        self.tokens += value.flatten().tolist()
        self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True), final=False)

    def end(self) -> None:
        """Print what is left."""
        self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True), final=True)
        sys.stdout.write("\n")

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
    top_p: float | None = typer.Option(None, min=0.0, max=1.0, help="Nucleus sampling."),
    seed: int = typer.Option(0, help="Seed for sampling."),
    chunk: int | None = typer.Option(None, min=1, help="Tokens per prefill chunk."),
    chat: bool = typer.Option(False, "--chat", help="Put the prompt into the chat template."),
    calibration: Path | None = options.CALIBRATION,
    dtype: str = options.DTYPE,
    prefix_store: str | None = typer.Option(
        None,
        metavar="STORE",
        help="Load the longest known prefix from this store (directory or URL); save new ones.",
        show_default=False,
    ),
    storage: str | None = typer.Option(
        None,
        metavar="SPEC",
        help="Store prefixes by this spec, such as pca:bits=1.5 (with --calibration).",
        show_default=False,
    ),
    tenant: str | None = typer.Option(None, help="Tenants share no prefixes.", show_default=False),
    password: str | None = PASSWORD,
    threads: int | None = options.THREADS,
) -> None:
    """Generate text on a compressed cache; prints memory and speed."""
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
    stream, started = Stream(tokenizer), time.perf_counter()
    with prefix_of(prefix_store, network, cache, tenant, password, storage, known) as prefix:
        prefix.load(ids)
        sampling |= {"prefill_chunk_size": chunk, "streamer": stream}
        prefix.save(continued(network, ids, cache, max_new_tokens, **sampling))
    show(spec, cache, stream, ids.shape[1], network.dtype, prefix, started)


def encode(tokenizer: Any, text: str, *, chat: bool = False) -> torch.Tensor:
    """Return the token ids ``[1, T]`` of a text.

    Raises
    ------
    InputError
        The chat template was asked for and the tokenizer has none.
    """
    if chat and not tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template; leave --chat out")
    if chat:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: torch.Tensor = inputs["input_ids"]
    return ids


def show(
    spec: str,
    cache: Any,
    stream: Stream,
    length: int,
    dtype: torch.dtype,
    prefix: Prefix,
    started: float,
) -> None:
    """Print what the cache holds and how fast it went."""
    stats, held = cache.stats(), cache.memory_usage()
    new = len(stream.tokens)
    prefill = stream.times[0] - stream.started
    decode = stream.times[-1] - stream.times[0]
    grid = table(("cache", spec))
    grid.add_row("prompt tokens", str(length))
    grid.add_row("new tokens", str(new))
    parts = stats["bytes"]
    grid.add_row("bytes held", size_text(held))
    grid.add_row("  packed slots", size_text(parts["codes"] + parts["side"]))
    grid.add_row("  exact sinks and window", size_text(parts["sinks"] + parts["window"]))
    grid.add_row("  allocated, not yet used", size_text(parts["unused"]))
    exact = {torch.float16: "fp16", dtype: str(dtype).removeprefix("torch.")}
    for kind, name in exact.items():
        exact_bytes = stats["values"] * kind.itemsize
        times = f" ({exact_bytes / held:.2f} x)" if held else ""
        grid.add_row(f"bytes of an exact cache, {name}", size_text(exact_bytes) + times)
    grid.add_row("bits per value", f"{stats['bits_per_value']:.2f}")
    grid.add_row("bits per value, packed slots", f"{stats['slot_bits_per_value']:.2f}")
    grid.add_row("layers compressed / native", "{compressed} / {native}".format(**stats["layers"]))
    grid.add_row("prefill, tokens/s", f"{(length - prefix.loaded) / prefill:.1f}")
    grid.add_row("decode, tokens/s", f"{(new - 1) / decode:.1f}" if new > 1 else "-")
    seconds = stream.times[0] - started
    grid.add_row("first token, seconds with the model loaded", f"{seconds:.2f}")
    for name, value in prefix.rows:
        grid.add_row(name, value)
    output_console().print(grid)
